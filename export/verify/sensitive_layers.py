"""Which of the target's layers need more than four bits: measured, one kind of product at a time.

Owns: what is measured, and which kinds get eight bits. Does not own: the formats (`block_formats.py`), which products
have the same input (`aware_quantisation.py`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.quality import mean_divergence, reference_choices
from mirrorsd.export.verify.rounded_weights import as_stored
from mirrorsd.export.weights.block_formats import WeightFormats

Loss = Callable[[Collection[str]], float]

FINER_SHARE = 0.2
"""Of the layers' weights, the most that get eight bits: 0.8 bits per weight more where all of it is used."""


def finer_weights(
    target: Checkpoint,
    formats: WeightFormats,
    dtype: torch.dtype,
    groups: Iterable[Sequence[str]],
    windows: npt.NDArray[np.int64],
) -> tuple[str, ...]:
    """Names of the weights that get eight bits, at most `FINER_SHARE` of all that `groups` hold.

    For each kind of product, its weights of all layers are rounded to nearest in four bits, everything else in eight.
    How far the likeliest tokens then are from the float model's, per weight, is the order.

    Args:
        target: The checkpoint.
        formats: Of its weights, the layers in four bits.
        dtype: What the stages compute in.
        groups: Names of the weights that are multiplied with one input; they become one product, of one format.
        windows: `[W, L]` ids of a text.
    """
    model = open_model(target)
    sizes = {stored.name: stored.size for stored in model.stored.values()}
    reference = reference_choices(model, windows)
    kinds = by_kind(groups)
    every = {name for names in kinds.values() for name in names}

    def loss(rounded: Collection[str]) -> float:
        finer = formats.with_finer(every.difference(rounded))
        return mean_divergence(as_stored(open_model(target), finer, dtype), reference)

    return most_sensitive(kinds, sizes, loss)


def by_kind(groups: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Join groups whose first names differ by numbers alone: those of all layers, and of all experts in them.

    >>> by_kind([("layers.0.q", "layers.0.k"), ("layers.0.o",), ("layers.1.q", "layers.1.k"), ("layers.1.o",)])
    {'layers.*.q': ('layers.0.q', 'layers.0.k', 'layers.1.q', 'layers.1.k'), 'layers.*.o': ('layers.0.o', 'layers.1.o')}
    """
    kinds: dict[str, tuple[str, ...]] = {}
    for group in groups:
        kind = re.sub(r"\d+", "*", group[0])
        kinds[kind] = (*kinds.get(kind, ()), *group)
    return kinds


def most_sensitive(kinds: Mapping[str, Sequence[str]], sizes: Mapping[str, int], loss: Loss) -> tuple[str, ...]:
    """The weights of the kinds that lose most per weight, as many kinds as `FINER_SHARE` has room for.

    >>> kinds, sizes = {"v": ["v0"], "up": ["u0"], "o": ["o0"]}, {"v0": 10, "u0": 80, "o0": 10}
    >>> most_sensitive(kinds, sizes, lambda names: {"v0": 0.3, "u0": 1.0, "o0": 0.1}[names[0]])
    ('v0', 'o0')
    """
    weights = {kind: sum(sizes[name] for name in names) for kind, names in kinds.items()}
    losses = {kind: loss(names) for kind, names in kinds.items()}
    room = FINER_SHARE * sum(weights.values())
    chosen: list[str] = []
    for kind in sorted(kinds, key=lambda kind: losses[kind] / weights[kind], reverse=True):
        if weights[kind] <= room:
            room -= weights[kind]
            chosen.extend(kinds[kind])
    return tuple(chosen)
