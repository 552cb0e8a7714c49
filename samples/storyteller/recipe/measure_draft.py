"""Measure the draft on greedy text of the target: agreement, and accepted lengths of windows.

python measure_draft.py DRAFT TEXT_HELD_BACK OUT.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from mirrorsd.training.draft_report import measure_agreement, measure_windows
from mirrorsd.training.self_text import SelfText, cut_before_loop, load_texts
from mirrorsd.training.streaming_draft import StreamingDraft


def measure(draft: StreamingDraft, texts: list[SelfText], window_texts: list[SelfText], gamma: int) -> dict[str, Any]:
    """Return agreement on all texts, and windows of one, two and three passes on some of them."""
    windows = {str(j): measure_windows(draft, window_texts, passes=j, gamma=gamma).summary() for j in (1, 2, 3)}
    return {"agreement": measure_agreement(draft, texts), "windows": windows}


def main(draft: Path, held_back: Path, out: Path, texts: int = 40, gamma: int = 6, threads: int = 2) -> None:
    """Measure and write."""
    torch.set_num_threads(threads)
    model = StreamingDraft.load(draft).eval()
    greedy = [text for text in load_texts(held_back) if text.temperature == 0]
    order = np.random.default_rng(0).permutation(len(greedy))[:texts]
    chosen = [greedy[number] for number in order]
    report = {
        "texts": len(greedy),
        "window_texts": len(chosen),
        "gamma": gamma,
        "whole": measure(model, greedy, chosen, gamma),
        "before_loops": measure(
            model, *([cut_before_loop(text) for text in texts] for texts in (greedy, chosen)), gamma
        ),
    }
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
