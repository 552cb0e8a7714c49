"""Measure the draft on greedy text of the target: agreement, and accepted lengths of windows.

python measure_draft.py DRAFT TEXT_HELD_BACK OUT.json
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import typer

from mirrorsd.training.draft_report import measure_agreement, measure_windows
from mirrorsd.training.self_text import load_texts
from mirrorsd.training.streaming_draft import StreamingDraft


def main(draft: Path, held_back: Path, out: Path, texts: int = 60, gamma: int = 6, threads: int = 2) -> None:
    """Measure and write."""
    torch.set_num_threads(threads)
    model = StreamingDraft.load(draft).eval()
    greedy = [text for text in load_texts(held_back) if text.temperature == 0]
    order = np.random.default_rng(0).permutation(len(greedy))[:texts]
    chosen = [greedy[number] for number in order]
    report = {
        "texts": len(greedy),
        "agreement": measure_agreement(model, greedy),
        "gamma": gamma,
        "window_texts": len(chosen),
        "windows": {str(j): measure_windows(model, chosen, passes=j, gamma=gamma).summary() for j in (1, 2, 3)},
    }
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
