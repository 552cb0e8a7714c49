"""Which of the target's layers need more than four bits: measured, one kind of product at a time.

Owns: what is measured, which kinds get eight bits, and the plan that is fitted so. Does not own: the formats
(`block_formats.py`), which products have the same input (`aware_quantisation.py`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mirrorsd.export.bundle.target_graphs import TargetPlan
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.passes.aware_quantisation import collect_inputs
from mirrorsd.export.verify.quality import (
    FITTED_WINDOWS,
    NUM_WINDOWS,
    WINDOW_ROWS,
    mean_divergence,
    reference_choices,
)
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


def fitted_plan(
    target: Checkpoint,
    plan: TargetPlan,
    model: WeightlessModel,
    windows: npt.NDArray[np.int64],
    folder: Path,
    *,
    may_scan: bool,
    report: Callable[[str, float], None],
) -> TargetPlan:
    """Round by what a text `[W, L]` gives the products; what four bits hurt most gets eight.

    `folder` is for what products are given. A head is scanned in the layers' bits where it `may` and can.
    """
    few = f" on {windows.size} tokens only: a longer --calibration text, of 9,000 or more, rounds better"
    is_short = windows.size < FITTED_WINDOWS * WINDOW_ROWS // 2
    report(f"collect inputs of products{few if is_short else ''}", 0.22)
    folder.mkdir(exist_ok=True)
    is_scanned = may_scan and _can_be_scanned(model, plan)
    inputs = collect_inputs(model, windows, folder, with_head=is_scanned)
    report("find layers that need eight bits", 0.23)
    dtype = getattr(torch, plan.shape.dtype)
    of_all_kinds = windows[:: max(1, len(windows) // NUM_WINDOWS)][:NUM_WINDOWS]
    finer = finer_weights(target, plan.formats, dtype, inputs.groups, of_all_kinds)
    formats = plan.formats.with_finer(finer)
    if is_scanned:
        formats = replace(formats, scan=formats.layers)
    return replace(plan, formats=formats, choose_pack=inputs.choose_pack)


def _can_be_scanned(model: WeightlessModel, plan: TargetPlan) -> bool:
    """Whether four bits are enough to find a row's best tokens: the embedding must hold the same weights in eight."""
    head, embedding = model.network.get_output_embeddings(), model.network.get_input_embeddings()
    is_tied = head.weight is embedding.weight and head.bias is None
    return is_tied and plan.formats.embedding is not None and plan.formats.embedding.bits == 8
