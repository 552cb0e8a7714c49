"""Does a compiled draft still say what the draft says: every static shape on its device against fp32 on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.machine.npu.conformance import Conformance, check_conformance
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.runtime.backends.protocol import DraftSession

MIN_AGREEMENT = 0.99
MIN_ROUNDED_AGREEMENT = 0.95
"""Where more is rounded than in the bundle (a processor's bf16 or eight-bit activations, an NPU's int8 head): near ties
go either way, no text changes."""
_REFERENCE = DraftPlacement(device="CPU", precision="f32", threads=1)
_MIN_PREDICTIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCheck:
    """One static shape: can an NPU that shall have it take it, what did compiling cost, and does it compute the same.

    Attributes:
        compile_seconds: reading it from disk where `is_from_disk`, compiling it otherwise.
        wanted_agreement: what `top1_agreement` must reach on this card.
        top1_agreement: share of predictions (next token and streams) whose best token is that of fp32 on the CPU.
        ignores_dead_slots: whether cache slots that the mask hides leave the result untouched, to the last id.
    """

    bucket: DraftBucket
    capacity: int
    conformance: Conformance
    compile_seconds: float
    is_from_disk: bool
    wanted_agreement: float
    top1_agreement: float
    num_predictions: int
    ignores_dead_slots: bool

    @property
    def is_fine(self) -> bool:
        """Whether nothing speaks against this shape."""
        agrees = self.top1_agreement >= self.wanted_agreement
        return agrees and self.ignores_dead_slots and not self.conformance.problems


def check_shape(
    bundle: Path, entry: DraftEntry, placement: DraftPlacement, bucket: DraftBucket, capacity: int, ids: Sequence[int]
) -> ShapeCheck:
    """Compile one static shape (or take it from disk) and compare it over the text `ids`.

    Raises:
        DeviceError: the device does not take the shape, or fails while running it.
    """
    only = replace(entry, buckets=(bucket,), capacities=(capacity,))
    model = OpenVinoDraftModel(bundle, only, placement)
    graph = model.shapes.graph
    conformance = check_conformance(graph.device_model(bucket.rows, bucket.tips, capacity))
    if not graph.is_cut:
        conformance = replace(conformance, problems=())
    started = perf_counter()
    model.shapes.warm_up(bucket.rows, bucket.tips, capacity)
    seconds = perf_counter() - started
    text = list(ids[: capacity - bucket.rows])
    found = best_tokens(model.new_session(), bucket, text)
    expected = best_tokens(OpenVinoDraftModel(bundle, only, _REFERENCE).new_session(), bucket, text)
    return ShapeCheck(
        bucket=bucket,
        capacity=capacity,
        conformance=conformance,
        compile_seconds=round(seconds, 3),
        is_from_disk=model.shapes.cache is not None and model.shapes.cache.num_read > 0,
        wanted_agreement=wanted_agreement(placement, entry.precision),
        top1_agreement=round(float(np.mean(found == expected)), 5),
        num_predictions=found.size,
        ignores_dead_slots=ignores_dead_slots(model.new_session(), bucket, text),
    )


def wanted_agreement(placement: DraftPlacement, weights: str) -> float:
    """How often the best token must be that of f32: nearly always, unless more is rounded than in the bundle.

    A card may let a processor round; an NPU gets an int8 head where the draft's `weights` are integers.
    """
    if placement.device == "CPU":
        is_rounded = placement.precision != "f32" or placement.activation_group > 0
    else:
        is_rounded = weights in ("int8", "int4")
    return MIN_ROUNDED_AGREEMENT if is_rounded else MIN_AGREEMENT


def best_tokens(session: DraftSession, bucket: DraftBucket, text: Sequence[int]) -> NDArray[np.int64]:
    """The best token of every prediction `[tips, 1 + s]`, the text before each pass cached through this very shape.

    The passes end at places spread evenly over the text, so that a few of them see all of it.
    """
    rows, tips = bucket.rows, bucket.tips
    for start in range(0, len(text), rows):
        chunk = text[start : start + rows]
        session.run([RowBlock(chunk, start, start)], [0])
        session.keep_rows(range(len(chunk)), range(start, start + len(chunk)))
    num_passes = -(-_MIN_PREDICTIONS // (tips * (1 + session.shape.num_streams)))
    stops = np.linspace(rows, len(text), num_passes, dtype=int)
    found = []
    for stop in stops.tolist():
        block = RowBlock(text[stop - rows : stop], stop - rows, stop - rows)
        found.append(session.run([block], range(rows - tips, rows)).ids[:, :, 0].copy())
    return np.concatenate(found)


def ignores_dead_slots(session: DraftSession, bucket: DraftBucket, text: Sequence[int]) -> bool:
    """Whether a pass over a cache of zeros equals one over a cache with hidden rows in its last slots."""
    block, tips = RowBlock(text[: bucket.rows], 0, 0), range(bucket.rows - bucket.tips, bucket.rows)
    over_zeros = session.run([block], tips).ids.copy()
    session.keep_rows(range(bucket.rows), range(session.capacity - bucket.rows, session.capacity))
    return bool(np.array_equal(over_zeros, session.run([block], tips).ids))
