"""Which of the target's layers need more than four bits: measured, one kind of product at a time.

Owns: what is measured, and which kinds get eight bits. Does not own: the formats (`block_formats.py`), which products
have the same input (`aware_quantisation.py`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.quality import mean_divergence, reference_choices
from mirrorsd.export.verify.rounded_weights import as_stored
from mirrorsd.export.weights.block_formats import WeightFormats

Group = Sequence[str]
Loss = Callable[[Collection[str]], float]

FINER_SHARE = 0.2
"""Of the layers' weights, the most that get eight bits: 0.8 bits per weight more where all of it is used. So the
storyteller keeps 94.6 % of its best tokens. 0.1: 93.8 %, in 4 % less. 0.4: 95.8 %, in 7 % more
(`bench/studies/weights/integer_bounds.py --of finer`)."""
_PARTS = 4
"""Runs of layers that a kind too large for the room is cut into: each is measured, which takes a pass of the model. 1:
94.2 % of the best tokens (as above)."""


def finer_weights(
    target: Checkpoint,
    formats: WeightFormats,
    dtype: torch.dtype,
    groups: Iterable[Group],
    windows: npt.NDArray[np.int64],
) -> tuple[str, ...]:
    """Names of the weights that get eight bits, at most `FINER_SHARE` of all that `groups` hold.

    For each kind of product, its weights of all layers are rounded to nearest in four bits, everything else in eight.
    How far the likeliest tokens then are from the float model's, per weight, is the order. Kinds that fit are taken
    whole. The first other one whose quarters of the depth do is cut into these, and those that lose most are taken.

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
    kinds = list(by_kind(groups).values())
    every = {name for kind in kinds for group in kind for name in group}

    def loss(rounded: Collection[str]) -> float:
        finer = formats.with_finer(every.difference(rounded))
        return mean_divergence(as_stored(open_model(target), finer, dtype), reference)

    return most_sensitive(kinds, sizes, loss)


def by_kind(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Join groups whose first names differ by numbers alone: those of all layers, and of all experts in them.

    >>> by_kind([("layers.0.q", "layers.0.k"), ("layers.0.o",), ("layers.1.q", "layers.1.k")])
    {'layers.*.q': [('layers.0.q', 'layers.0.k'), ('layers.1.q', 'layers.1.k')], 'layers.*.o': [('layers.0.o',)]}
    """
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        kinds.setdefault(re.sub(r"\d+", "*", group[0]), []).append(group)
    return kinds


def kind_names(names: Iterable[str], every: Collection[str]) -> list[str]:
    """Each kind among `names`: "*" for its numbers, or the layers' numbers where `every` has more of that kind.

    >>> every = ["h.0.q", "h.1.q", *(f"h.{layer}.up" for layer in range(6))]
    >>> kind_names(["h.0.q", "h.1.q", "h.2.up", "h.3.up", "h.5.up"], every)
    ['h.*.q', 'h.2-3,5.up']
    """
    sizes = {kind: len(groups) for kind, groups in by_kind((name,) for name in every).items()}
    found = []
    for kind, groups in by_kind((name,) for name in names).items():
        numbers = sorted({int(re.findall(r"\d+", name)[0]) for (name,) in groups}) if "*" in kind else []
        starts = [number for number in numbers if number - 1 not in numbers]
        ends = [number for number in numbers if number + 1 not in numbers]
        runs = ",".join(
            f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True)
        )
        found.append(kind.replace("*", runs, 1) if len(groups) < sizes.get(kind, 0) else kind)
    return found


def most_sensitive(kinds: Iterable[Sequence[Group]], sizes: Mapping[str, int], loss: Loss) -> tuple[str, ...]:
    """The weights that lose most per weight, as many as `FINER_SHARE` has room for.

    Of 20 weights `v` and one of the two `d` get eight bits: there is no room for both.

    >>> kinds, sizes = [[("v0",)], [("d0",), ("d1",)]], {"v0": 1, "d0": 2, "d1": 2, "u0": 15}
    >>> losses = {("v0",): 0.3, ("d0", "d1"): 0.9, ("d0",): 0.2, ("d1",): 0.7, ("u0",): 1.0}
    >>> most_sensitive([*kinds, [("u0",)]], sizes, lambda names: losses[tuple(names)])
    ('v0', 'd1')
    """
    whole = list(kinds)
    room = FINER_SHARE * sum(_size(kind, sizes) for kind in whole)
    chosen, left = _fitting(whole, sizes, loss, room)
    room -= sum(sizes[name] for name in chosen)
    for kind in left:
        ends = [len(kind) * part // _PARTS for part in range(_PARTS + 1)]
        parts = [kind[start:end] for start, end in pairwise(ends) if start < end]
        if min(_size(part, sizes) for part in parts) <= room:
            chosen += _fitting(parts, sizes, loss, room)[0]
            break
    return tuple(chosen)


def _size(part: Sequence[Group], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for group in part for name in group)


def _fitting(
    parts: Iterable[Sequence[Group]], sizes: Mapping[str, int], loss: Loss, room: float
) -> tuple[list[str], list[Sequence[Group]]]:
    """Names of the parts that lose most per weight and fit into `room` weights; what does not fit, in that order."""
    measured = []
    for part in parts:
        names = [name for group in part for name in group]
        measured.append((loss(names) / _size(part, sizes), names, part))
    chosen: list[str] = []
    left: list[Sequence[Group]] = []
    for _, names, part in sorted(measured, key=lambda one: one[0], reverse=True):
        if _size(part, sizes) <= room:
            room -= _size(part, sizes)
            chosen.extend(names)
        else:
            left.append(part)
    return chosen, left
