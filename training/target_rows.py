"""What the target's head reads along a text, kept for the next time that the text is read.

A training reads its text again and again, in the same rectangles. The target is frozen, so it says the same each time;
and it is what half of a training's time goes to. Its last hidden states take two bytes a number in the host's memory.

Owns: the target's forward pass of a distillation. Does not own: the head (`divergence.py`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.training.run.device import product_dtype

__all__ = ["TargetRows", "target_rows"]


@torch.no_grad()
def target_rows(target: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the target's head reads for a text `[B,S]`: `[B,S,H]`."""
    decoder: Any = cast(Any, target).get_decoder()
    hidden: Tensor = decoder(ids, use_cache=False).last_hidden_state
    return hidden


class TargetRows:
    """`target_rows` that remembers.

    Attributes:
        num_computed: texts that the target has read.
    """

    def __init__(self, target: PreTrainedModel, most_bytes: int, *, is_compiled: bool = False) -> None:
        """Keep up to `most_bytes`: what was read first, as all of it is read equally often."""
        self._target, self._free = target, most_bytes
        self._rows_of = torch.compile(target_rows) if is_compiled else target_rows
        self._known: dict[bytes, Tensor] = {}
        self.num_computed = 0

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows of `ids [B,S]`: `[B,S,H]` in the type that products are made in."""
        names = [row.tobytes() for row in ids.cpu().numpy()]
        missing = [place for place, name in enumerate(names) if name not in self._known]
        fresh = dict(zip(missing, self._compute(ids[missing]), strict=True)) if missing else {}
        rows = [
            fresh[place] if place in fresh else self._known[name].to(ids.device) for place, name in enumerate(names)
        ]
        for place, row in fresh.items():
            self._keep(names[place], row)
        return torch.stack(rows)

    def _compute(self, ids: Tensor) -> Tensor:
        self.num_computed += len(ids)
        return self._rows_of(self._target, ids).to(product_dtype())

    def _keep(self, name: bytes, row: Tensor) -> None:
        size = row.nbytes + len(name)
        if name not in self._known and size <= self._free:
            self._known[name] = row.to("cpu", copy=True)
            self._free -= size
