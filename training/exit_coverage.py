"""How often an exit's top-k holds the token that the whole target would choose.

Owns: the measurement, and its file beside the target's weights.
Does not own: the adapters (`exit_adapter.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .exit_adapter import ExitAdapter, exit_logits
from .self_text import SelfText

__all__ = ["COVERAGE_FILE", "TOP_K", "measure_coverage", "write_coverage"]

COVERAGE_FILE = "exit_coverage.json"
TOP_K = (1, 4, 8, 16)


@torch.inference_mode()
def measure_coverage(
    target: PreTrainedModel, adapters: dict[int, ExitAdapter], texts: Iterable[SelfText]
) -> dict[str, Any]:
    """Return the share of positions whose argmax by the target is in the exit's top-k, before and after the adapter.

    Only positions that the target wrote itself count; the last prompt token predicts the first of them.

    Returns:
        `{"positions": n, "layers": {"3": {"untrained": {"1": share, ...}, "adapter": {...}}}}`
    """
    hits = {layer: {"untrained": torch.zeros(len(TOP_K)), "adapter": torch.zeros(len(TOP_K))} for layer in adapters}
    positions = 0
    for text in texts:
        outputs = target(torch.tensor([text.tokens]), use_cache=False, output_hidden_states=True)
        written = slice(text.prompt_length - 1, len(text.tokens) - 1)
        best = outputs.logits[0, written].argmax(-1)
        positions += len(best)
        for layer, adapter in adapters.items():
            hidden = outputs.hidden_states[layer][0, written]
            hits[layer]["untrained"] += _count(target, hidden, None, best)
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


def write_coverage(folder: Path, coverage: dict[str, Any], text: str) -> None:
    """Write the coverage beside the target's weights; `text` says what it was measured on."""
    content = {"text": text, **coverage}
    (folder / COVERAGE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
