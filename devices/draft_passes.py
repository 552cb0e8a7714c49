"""What a draft's passes look like on a device: of how many rows and tips they are, and the host's memory for them."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import StageContract
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry

Shape = tuple[int, int, int]
"""Rows, tips, capacity."""


def pass_buckets(entry: DraftEntry, placement: DraftPlacement, *, is_shared: bool) -> list[DraftBucket]:
    """The buckets that passes go through, smallest first.

    On a processor each of a small draft's shapes has weights of its own, and what one pass leaves in the processor's
    cache is of use to the next only if that has the same shape. So the passes of a window, of few rows each, all go
    through one: what would have had fewer tips costs a little more alone, and less where the target runs in between.
    A bucket of one tip is kept for long prompts only, with more rows than any round.

    One model for all shapes takes rounds of one row and of two as they are, and texts of every size with one tip: not
    half of what is computed is padding.
    """
    ordered = sorted(entry.buckets, key=lambda bucket: (bucket.rows, bucket.tips))
    if is_shared:
        small = [DraftBucket(rows=rows, tips=rows) for rows in (1, 2) if rows < ordered[0].rows]
        most = ordered[-1].rows
        sizes = {most * parts >> power for power in range(1, most.bit_length()) for parts in (2, 3)}
        read = [DraftBucket(rows=rows, tips=1) for rows in sizes if ordered[0].rows <= rows <= most]
        return sorted({*small, *ordered, *read}, key=lambda bucket: (bucket.rows, bucket.tips))
    rounds = [bucket for bucket in ordered if bucket.tips > 1]
    if placement.device != "CPU" or not rounds:
        return ordered
    return [bucket for bucket in ordered if bucket in rounds or bucket.rows > rounds[-1].rows]


def any_bucket(rows: int, tips: int) -> DraftBucket:
    """So many rows and tips, or a few more: what is kept for each shape is kept for few shapes.

    >>> [any_bucket(rows, 1).rows for rows in (1, 3, 5, 7, 9)]
    [1, 3, 6, 8, 12]
    """
    return DraftBucket(rows=_padded(rows), tips=_padded(tips))


def _padded(count: int) -> int:
    """The next power of two, or three quarters of it."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def host_ports(contract: StageContract) -> list[str]:
    """All ports but the caches."""
    return [spec.name for spec in (*contract.inputs, *contract.outputs) if not spec.name.startswith("past_")]


def host_arrays(contract: StageContract, shape: Shape, kind: DTypeLike) -> dict[str, NDArray[Any]]:
    """Host memory for every port but the caches; new keys and values are of `kind`."""
    rows, tips, capacity = shape
    sizes = {"N": rows, "R": tips, "C": capacity, "C+N": capacity + rows}
    specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
    return {
        name: np.zeros(
            [sizes[dim] if isinstance(dim, str) else dim for dim in specs[name].shape],
            dtype=kind if names.is_new(name) else specs[name].dtype,
        )
        for name in host_ports(contract)
    }
