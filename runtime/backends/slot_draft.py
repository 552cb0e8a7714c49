"""A draft's session: a cache of slots, and passes of fixed numbers of rows and tips on it.

All requests of one capacity share one key/value cache; a text that outgrows it moves to the next capacity, which
`prepare` has made ready before the draft read the text; a shorter text moves back. Does not own: passes of several
sessions (`draft_room`), how one is computed (`devices/openvino/draft_pass`, `onnxruntime/draft`).
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import CachePart, DraftNoise, PassBuffers, RowBlock, SlotCache
from mirrorsd.devices.draft_passes import Shape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.runtime.backends.joint_rounds import DraftPass, JointRounds
from mirrorsd.runtime.backends.protocol import DraftSession, TipGuesses
from mirrorsd.runtime.sampling.chooser import NoiseSource


class SlotRequest(Protocol):
    """Passes of one shape, with inputs, outputs and cache bound once.

    Attributes:
        buffers: inputs and outputs.
    """

    buffers: PassBuffers

    def bind(self, cache: Any) -> None:
        """Use `cache`, one of its own `DraftShapes`, if it has this shape's capacity."""

    def use_noise(self, noise: DraftNoise) -> None:
        """Read this noise from now on."""

    def infer(self) -> None:
        """Run the pass.

        Raises:
            DeviceError: the device failed.
        """


class DraftShapes(Protocol):
    """What a draft's sessions run on, shared by all of them.

    Attributes:
        buckets: the passes' rows and tips, smallest first.
    """

    buckets: list[DraftBucket]

    def is_warm(self, rows: int, tips: int, capacity: int) -> bool:
        """Whether this shape has been run."""

    def warm_up(self, rows: int, tips: int, capacity: int) -> None:
        """Have this shape run once, so that its first real round pays nothing."""

    def fill_cache(self) -> None:
        """Make ready on disk what later requests would wait for."""

    def joint_bucket(self, rows: int, tips: int, capacity: int) -> DraftBucket | None:
        """What a pass of several sessions is padded to; None if there is nothing that nobody has to wait for."""

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty key/value cache."""

    def new_request(self, shape: Shape, cache: Any) -> SlotRequest:
        """A request for passes of one shape, bound to a cache of that capacity that `new_cache` has made."""


class SlotDraftModel(Protocol):
    """A draft that is loaded."""

    @property
    def entry(self) -> DraftEntry:
        """The draft in the manifest."""

    @property
    def shapes(self) -> DraftShapes:
        """What its sessions run on."""

    @property
    def rounds(self) -> JointRounds:
        """Makes passes of several sessions one."""


class SlotDraft(DraftSession):
    """A `DraftSession` of whichever runtime: one cache, and the requests bound to it.

    Attributes:
        cache: its slots, or its part of those that several sessions share.
        last: keys and values of the last pass's own rows, `[1, kvh, n, hd]`, of all layers in turn.
        last_pass_seconds: what the device took for the last pass of this session alone, from start to finish.
    """

    def __init__(self, model: SlotDraftModel) -> None:
        entry = model.entry
        self.shape = entry.shape
        decode = [bucket for bucket in entry.buckets if bucket.tips > 1] or list(entry.buckets)
        self.round_sizes = tuple(sorted({bucket.rows for bucket in decode}))
        self.max_tips = max(bucket.tips for bucket in decode)
        self.prefill_rows = max(bucket.rows for bucket in entry.buckets)
        self.capacity = max(entry.capacities)
        self._model = model
        self._requests: dict[tuple[int, int, int], SlotRequest] = {}
        self.cache = model.shapes.new_cache(min(entry.capacities))
        self.noise = DraftNoise(entry.shape) if entry.shape.num_noise_rows else None
        self.last: list[NDArray[np.floating]] = []
        self._is_closed = False
        self.last_pass_seconds = 0.0

    def warm_up(self) -> None:
        """Run every bucket at the first capacity once, so that the first request pays nothing; fill the cache."""
        self.prepare(1)
        self._model.shapes.fill_cache()

    def is_prepared(self, num_slots: int) -> bool:
        return all(self._model.shapes.is_warm(*shape) for shape in self._shapes(num_slots))

    def prepare(self, num_slots: int) -> None:
        """Get all that ready; a session that is closed meanwhile ends it."""
        for shape in self._shapes(num_slots):
            if not self._is_closed:
                self._model.shapes.warm_up(*shape)

    def use_noise(self, source: NoiseSource | None) -> None:
        if self.noise is not None:
            self.noise.follow(source)

    @property
    def is_silent(self) -> bool:
        """Whether candidates are ranked without noise."""
        return self.noise is None or self.noise.is_silent

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        return self._model.rounds.run(DraftPass(self, blocks, tip_rows))

    def run_alone(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """Run a pass of this session alone, on a cache of its own."""
        if isinstance(self.cache, CachePart):
            self._resize(self.cache.capacity)
        num_rows = sum(len(block.tokens) for block in blocks)
        request = self._request(self._smallest_bucket(num_rows, len(tip_rows)))
        request.buffers.inputs.fill(blocks, tip_rows)
        if self.noise is not None:
            request.use_noise(self.noise)
            request.buffers.name_noise(self.noise, len(tip_rows))
        started = perf_counter()
        request.infer()
        self.last_pass_seconds = perf_counter() - started
        self.last, count = request.buffers.new_rows, len(tip_rows)
        return TipGuesses(request.buffers.tip_ids[:count], request.buffers.tip_logprobs[:count])

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        if not len(slots) or not self.last:
            return
        self._reserve(max(slots) + 1)
        row_index, slot_index = _index(rows), _index(slots)
        for cached, new in zip(self.cache.arrays, self.last, strict=True):
            cached[0][:, slot_index] = new[0][:, row_index]

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        source_index, destination_index = np.asarray(sources), _index(destinations)
        for cached in self.cache.arrays:
            cached[0][:, destination_index] = cached[0][:, source_index]

    def forget_after(self, num_slots: int) -> None:
        """Move back to the smallest capacity that holds what is left."""
        fitting = next(size for size in self._capacities if size >= num_slots)
        if fitting < self.cache.capacity:
            self._resize(fitting)

    def close(self) -> None:
        """Drop requests, cache and noise. The session cannot be used afterwards."""
        self._is_closed = True
        self._requests.clear()
        self.last, self.noise = [], None
        del self.cache

    @property
    def _capacities(self) -> list[int]:
        return sorted(self._model.entry.capacities)

    def _shapes(self, num_slots: int) -> list[Shape]:
        """What a text of up to `num_slots` slots uses, in the order in which it will."""
        last = next((size for size in self._capacities if size >= num_slots), self._capacities[-1])
        capacities = [size for size in self._capacities if size <= last]
        return [(bucket.rows, bucket.tips, size) for size in capacities for bucket in self._model.shapes.buckets]

    def reserve(self, blocks: Sequence[RowBlock]) -> None:
        """Have the slots that a pass looks at."""
        self._reserve(max(_slots_needed(block) for block in blocks))

    def move_to(self, part: CachePart) -> None:
        """Use slots that are shared from now on."""
        part.take(self.cache)
        self.cache = part

    def _reserve(self, num_slots: int) -> None:
        """Move to the smallest capacity that holds `num_slots`."""
        if num_slots <= self.cache.capacity:
            return
        fitting = [capacity for capacity in self._capacities if capacity >= num_slots]
        if not fitting:
            raise DeviceError(f"The draft needs {num_slots} cache slots; this bundle has at most {self.capacity}.")
        self._resize(fitting[0])

    def _resize(self, capacity: int) -> None:
        cache = self._model.shapes.new_cache(capacity)
        cache.take(self.cache)
        self.cache = cache
        for request in self._requests.values():
            request.bind(self.cache)

    def _smallest_bucket(self, num_rows: int, num_tips: int) -> DraftBucket:
        for bucket in self._model.shapes.buckets:
            if bucket.rows >= num_rows and bucket.tips >= num_tips:
                return bucket
        raise DeviceError(f"No draft bucket takes {num_rows} rows and {num_tips} tips.")

    def _request(self, bucket: DraftBucket) -> SlotRequest:
        key = (bucket.rows, bucket.tips, self.cache.capacity)
        if key not in self._requests:
            self._requests[key] = self._model.shapes.new_request(key, self.cache)
        return self._requests[key]


def _index(places: Sequence[int]) -> slice | NDArray[np.int64]:
    """Places as numpy takes them fastest: a slice where they follow each other.

    >>> _index([4, 5, 6]), _index([4, 6])
    (slice(4, 7, None), array([4, 6]))
    """
    consecutive = range(places[0], places[0] + len(places))
    if list(places) == list(consecutive):
        return slice(consecutive.start, consecutive.stop)
    return np.asarray(places)


def _slots_needed(block: RowBlock) -> int:
    return max([block.chain_visible, *(slot + 1 for slot in block.extra_slots)])
