"""How often an exit's top-k holds the token that the whole target would choose.

Owns: the measurement, and its file beside the target's weights.
Does not own: the adapters (`exit_adapter.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.graphs.names import EXIT_COVERAGE_FILE
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.training.exit_adapter import ExitAdapter, exit_logits
from mirrorsd.training.plot_style import SERIES, legend_outside, save
from mirrorsd.training.text.self_text import SelfText

__all__ = ["TOP_K", "measure_coverage", "plot_coverage", "write_coverage"]
_log = logging.getLogger("mirrorsd")

TOP_K = (1, 4, 8, 16)


@torch.inference_mode()
def measure_coverage(
    target: PreTrainedModel, adapters: Mapping[int, ExitAdapter | None], texts: Iterable[SelfText]
) -> dict[str, Any]:
    """Return the share of positions whose argmax by the target is in the exit's top-k, before and after the adapter.

    Only positions that the target wrote itself count; the last prompt token predicts the first of them. A layer whose
    adapter is None is measured without one only.

    Returns:
        `{"positions": n, "layers": {"3": {"untrained": {"1": share, ...}, "adapter": {...}}}}`
    """
    hits = {
        layer: {"untrained": torch.zeros(len(TOP_K))} | ({"adapter": torch.zeros(len(TOP_K))} if adapter else {})
        for layer, adapter in adapters.items()
    }
    positions = 0
    for text in texts:
        outputs = target(torch.tensor([text.tokens]), use_cache=False, output_hidden_states=True)
        written = slice(text.prompt_length - 1, len(text.tokens) - 1)
        best = outputs.logits[0, written].argmax(-1)
        positions += len(best)
        for layer, adapter in adapters.items():
            hidden = outputs.hidden_states[layer][0, written]
            hits[layer]["untrained"] += _count(target, hidden, None, best)
            if adapter is not None:
                hits[layer]["adapter"] += _count(target, hidden, adapter, best)
    return {
        "positions": positions,
        "layers": {
            str(layer): {kind: _shares(counts, positions) for kind, counts in kinds.items()}
            for layer, kinds in hits.items()
        },
    }


def _count(target: PreTrainedModel, hidden: Tensor, adapter: nn.Module | None, best: Tensor) -> Tensor:
    """Count for each k of `TOP_K` the rows whose `best [S]` is among the exit's k most likely."""
    top = exit_logits(target, hidden, adapter).topk(max(TOP_K)).indices
    is_hit = top == best[:, None]
    return torch.tensor([float(is_hit[:, :k].sum()) for k in TOP_K])


def _shares(counts: Tensor, positions: int) -> dict[str, float]:
    return {str(k): round(count / max(positions, 1), 4) for k, count in zip(TOP_K, counts.tolist(), strict=True)}


def write_coverage(folder: Path, coverage: dict[str, Any], text: str) -> dict[str, Any]:
    """Write the coverage beside the target's weights, and return what was written; `text` says what it was measured on.

    The export carries it into the bundle's manifest.
    """
    content = {"text": text, **coverage}
    write_whole(folder / EXIT_COVERAGE_FILE, f"{json.dumps(content, indent=2)}\n".encode())
    return content


def plot_coverage(coverage: dict[str, Any], picture: Path) -> None:
    """Draw the coverage over the layers, one colour per k, dashed without adapter."""
    layers = [int(layer) for layer in coverage["layers"]]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for colour, k in zip(SERIES, map(str, TOP_K), strict=False):
            for kind, words, line in (("adapter", "trained", "-"), ("untrained", "untrained", "--")):
                points = [(int(layer), kinds[kind][k]) for layer, kinds in coverage["layers"].items() if kind in kinds]
                if points:
                    best = "the best" if k == "1" else f"the best {k}"
                    axes.plot(*zip(*points, strict=True), line, marker="o", color=colour, label=f"{best}, {words}")
        axes.set(xlabel="exit after layer", ylabel="share of positions", ylim=(0, 1.02), xticks=layers)
        axes.set_title("how often the target's own choice is among an exit's guesses")
        legend_outside(axes)

    save(picture, draw)
