"""What a training has learned, on text that it does not read.

Owns: which batches, and the line that is printed. Does not own: what is measured on one (each training's own).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from mirrorsd.training.run.device import autocast
from mirrorsd.training.text.token_stream import TokenStream

__all__ = ["print_held_back"]

_BATCHES = 4


def print_held_back(
    held_back: TokenStream,
    size: tuple[int, int],
    describe_batch: Callable[[tuple[Tensor, Tensor], int], dict[str, float]],
) -> None:
    """Print the means of what is measured on the first batches; nothing where there is less than one.

    Args:
        held_back: The text.
        size: Sequences and tokens per sequence of a batch.
        describe_batch: Takes what `take_marked` gives and the batch's number, and returns figures by name.
    """
    sequences, length = size
    held_back.place = 0
    found: list[dict[str, float]] = []
    for batch in range(min(_BATCHES, len(held_back) // (sequences * length))):
        taken = held_back.take_marked(sequences, length)
        with torch.no_grad(), autocast():
            found.append(describe_batch(taken, batch))
    if found:
        means = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
        shown = " ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        print(f"held back: {shown}", file=sys.stderr, flush=True)
