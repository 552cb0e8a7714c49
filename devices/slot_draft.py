"""A draft's session on the host: a cache of slots, and passes of fixed numbers of rows and tips on it.

All requests of one capacity share one key/value cache; a text that outgrows it moves to the next capacity, which
`prepare` has made ready before the draft read the text; a shorter text moves back. Inputs of a pass are written in
place, and outputs land where they are read. Does not own: passes of several sessions (`runtime/backends/draft_room`),
how one is computed (`openvino/draft_pass`, `runtime/backends/onnxruntime/draft`).
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import CachePart, DraftPass, RowBlock, SlotDraftModel, TipGuesses
from mirrorsd.devices.draft_passes import Shape
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.graphs.token_rows import TokenRows

NoiseSource = Callable[[int, int], NDArray[np.float64]]
"""Position, size of the vocabulary -> what competes with the log-probabilities there, `[V]`."""


class DraftNoise:
    """One session's noise of sampling, in memory that all of its requests share.

    Position `p` has row `p % P`. A row that holds another position's noise is written when it is asked for. With no
    source, all rows are zero: the likeliest tokens are best.

    Attributes:
        rows: `[P, V]`.
    """

    def __init__(self, shape: DraftShape) -> None:
        """Make zeros; `shape` has noise rows."""
        self.rows: NDArray[np.float32] = np.zeros((shape.num_noise_rows, shape.vocab_size), dtype=np.float32)
        self._positions = np.full(shape.num_noise_rows, -1, dtype=np.int64)
        self._source: NoiseSource | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the request has no noise: all rows are zero."""
        return self._source is None

    def follow(self, source: NoiseSource | None) -> None:
        """Begin a request whose noise comes from `source`, or one without noise."""
        if self._source is not None:
            self.rows.fill(0.0)
        self._positions.fill(-1)
        self._source = source

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that hold the noise of `positions`, of the same shape; writes those that are missing.

        With 4 rows, positions 5 and 8 have rows 1 and 0.
        """
        num_rows, vocab_size = self.rows.shape
        rows: NDArray[np.int64] = positions % num_rows
        if self._source is not None:
            for position in np.unique(positions[self._positions[rows] != positions]).tolist():
                self.rows[position % num_rows] = self._source(position, vocab_size)
                self._positions[position % num_rows] = position
        return rows


class DraftInputs:
    """Host views of one bucket's inputs: `ids[1,N] positions[1,N] mask[1,1,N,C+N] tip_rows[R] token_rows[1,N,H]`."""

    def __init__(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.float32],
        tip_rows: NDArray[np.int64],
        rows: NDArray[np.float32] | None = None,
        look_up: TokenRows | None = None,
    ) -> None:
        """`look_up` fills `rows` in."""
        self._rows, self._look_up = rows, look_up
        self._ids, self._positions, self._mask, self._tip_rows = ids[0], positions[0], mask[0, 0], tip_rows
        self.num_rows = ids.shape[1]
        self.num_tips = tip_rows.shape[0]
        self.capacity = mask.shape[3] - self.num_rows
        self._counting = np.arange(self.num_rows)
        self._causal = np.where(np.tri(self.num_rows, dtype=np.bool_), 0.0, MASKED).astype(mask.dtype)
        self._own_columns = self.capacity + self._counting

    def tip_positions(self, num_tips: int) -> NDArray[np.int64]:
        """Positions of the first `num_tips` tips of what was filled in."""
        positions: NDArray[np.int64] = self._positions[self._tip_rows[:num_tips]]
        return positions

    def fill(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> None:
        """Write the rows of a pass; padding rows see only themselves and are nobody's tip.

        Capacity 6, two chain rows in cache, one lead row (position 2) and a branch row that sees it: the branch row's
        mask is open at slots 0, 1, at row 0 (column 6) and at itself (column 7).

        >>> rows = np.zeros((1, 2), np.int64)
        >>> inputs = DraftInputs(rows, rows.copy(), np.zeros((1, 1, 2, 8), np.float32), np.zeros(1, np.int64))
        >>> inputs.fill([RowBlock([7], 2, 2), RowBlock([8], 3, 2, (), 1)], [1])
        >>> (inputs._mask == 0).astype(int).tolist()
        [[1, 1, 0, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1, 1]]
        """
        mask, capacity = self._mask, self.capacity
        mask.fill(MASKED)
        row = 0
        for block in blocks:
            size = len(block.tokens)
            stop = row + size
            self._ids[row:stop] = block.tokens
            np.add(self._counting[:size], block.first_position, out=self._positions[row:stop])
            slot, lead = block.first_slot, capacity + block.first_row
            mask[row:stop, slot : slot + block.chain_visible] = 0.0
            if block.extra_slots:
                mask[row:stop, np.add(slot, block.extra_slots)] = 0.0
            mask[row:stop, lead : lead + block.lead_rows] = 0.0
            mask[row:stop, capacity + row : capacity + stop] = self._causal[:size, :size]
            row = stop
        if row < self.num_rows:
            self._ids[row:] = self._positions[row:] = 0
            mask[self._counting[row:], self._own_columns[row:]] = 0.0
        self._tip_rows[: len(tip_rows)] = tip_rows
        self._tip_rows[len(tip_rows) :] = 0
        if self._rows is not None and self._look_up is not None:
            self._rows[0, :row] = self._look_up(self._ids[:row])
            self._rows[0, row:] = 0.0  # a mask adds to scores: what is no number shows through it


class PassBuffers:
    """Inputs and outputs of passes of one shape, in the host's memory.

    Attributes:
        inputs: what a pass is asked.
        tip_ids: `[R, 1+s, m]`, of the last pass.
        tip_logprobs: the same.
        new_rows: `[1, kvh, N, hd]`, keys and values of all layers in turn.
        noise_rows: `[R, 1+s]`, which rows of the noise compete at each tip.
    """

    def __init__(self, entry: DraftEntry, arrays: Mapping[str, NDArray[Any]], look_up: TokenRows | None = None) -> None:
        """Use `arrays`, the memory of every port but the caches; `look_up` gives a draft without rows the tokens'."""
        self.inputs = DraftInputs(
            ids=arrays[names.DRAFT_IDS],
            positions=arrays[names.DRAFT_POSITIONS],
            mask=arrays[names.DRAFT_MASK],
            tip_rows=arrays[names.DRAFT_TIP_ROWS],
            rows=arrays.get(names.DRAFT_TOKEN_ROWS),
            look_up=look_up,
        )
        self.noise_rows: NDArray[np.int64] = arrays.get(names.DRAFT_NOISE_ROWS, np.zeros(0, dtype=np.int64))
        self.tip_ids: NDArray[np.int64] = arrays[names.DRAFT_TIP_IDS]
        self.tip_logprobs: NDArray[np.float32] = arrays[names.DRAFT_TIP_LOGPROBS]
        layers = range(entry.shape.num_layers)
        self.new_rows: list[NDArray[np.floating]] = [
            arrays[name] for layer in layers for name in (names.new_key(layer), names.new_value(layer))
        ]
        self.inputs.fill([], [])  # what any device can run: no row sees more than itself
        self.noise_rows.fill(0)

    def tip_positions(self, num_tips: int) -> NDArray[np.int64]:
        """`[num_tips, 1+s]`: positions that the first tips and their streams predict."""
        ahead = 1 + np.arange(self.noise_rows.shape[1])
        return self.inputs.tip_positions(num_tips)[:, None] + ahead

    def name_noise(self, noise: DraftNoise, num_tips: int) -> None:
        """Let the tips' candidates compete with the noise of the positions that they predict."""
        if not noise.is_silent:  # else, whichever rows are named
            self.noise_rows[:num_tips] = noise.rows_at(self.tip_positions(num_tips))


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


class SlotDraft:
    """A `DraftSession` (`runtime/backends/protocol`) of whichever runtime: one cache, and the requests bound to it.

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
        """Whether all that a text of so many slots uses is ready."""
        return all(self._model.shapes.is_warm(*shape) for shape in self._shapes(num_slots))

    def prepare(self, num_slots: int) -> None:
        """Get all that ready; a session that is closed meanwhile ends it."""
        for shape in self._shapes(num_slots):
            if not self._is_closed:
                self._model.shapes.warm_up(*shape)

    def use_noise(self, source: NoiseSource | None) -> None:
        """Rank candidates with this noise."""
        if self.noise is not None:
            self.noise.follow(source)

    @property
    def shares_rounds(self) -> bool:
        """Whether a round has the rows of all conversations that draft at once, however many those are."""
        return self._model.rounds.takes_any

    @property
    def is_silent(self) -> bool:
        """Whether candidates are ranked without noise."""
        return self.noise is None or self.noise.is_silent

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """Run one pass, together with others' where they ask for theirs now."""
        rounds = self._model.rounds
        if rounds.num_working or isinstance(self.cache, CachePart):
            return rounds.run(DraftPass(self, blocks, tip_rows))
        self.reserve(blocks)
        return self.run_alone(blocks, tip_rows)

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
        """Write keys and values of rows of the last pass into cache slots."""
        if not len(slots) or not self.last:
            return
        self._reserve(max(slots) + 1)
        row_index, slot_index = _index(rows), _index(slots)
        for cached, new in zip(self.cache.arrays, self.last, strict=True):
            cached[0][:, slot_index] = new[0][:, row_index]

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy cache slots."""
        source_index, destination_index = np.asarray(sources), _index(destinations)
        for cached in self.cache.arrays:
            cached[0][:, destination_index] = cached[0][:, source_index]

    @property
    def copies_rows(self) -> bool:
        """Whether slots of another session's cache can be copied into its own."""
        return True

    def copy_rows(self, source: object, rows: range) -> None:
        """Copy these slots of the cache of a session of the same model."""
        assert isinstance(source, SlotDraft)  # of the same model
        self._reserve(rows.stop)
        for cached, other in zip(self.cache.arrays, source.cache.arrays, strict=True):
            cached[0][:, rows.start : rows.stop] = other[0][:, rows.start : rows.stop]

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
        """Use slots that are shared from now on; what was bound to others lets go of them."""
        part.take(self.cache)
        self.cache = part
        self._requests.clear()

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
