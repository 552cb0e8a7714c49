"""A draft's memory on the host: its cache of slots, and what a pass of fixed numbers of rows and tips reads and writes.

Inputs are written in place, and outputs land where they are read. Does not own: sessions and their requests
(`runtime/backends/slot_draft`), how a pass is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.token_rows import TokenRows


class RowBlock(NamedTuple):
    """Consecutive rows of one pass that form a causal chain.

    A row of the block sees cache slots `0 .. chain_visible - 1`, the cache slots in `extra_slots`, the first
    `lead_rows` rows of the pass (`lead_rows` is 0 for the block that starts the pass), and its block up to itself.
    Where several texts share a pass, slots count from `first_slot` of the cache, and rows from `first_row` of the pass.
    """

    tokens: Sequence[int]
    first_position: int
    chain_visible: int
    extra_slots: Sequence[int] = ()
    lead_rows: int = 0
    first_slot: int = 0
    first_row: int = 0


class SlotCache:
    """Key and value caches of all layers, `[1, kvh, C, hd]` each, key and value in turn.

    Attributes:
        capacity: slots of each.
        names: the ports that they are bound to.
        arrays: their numbers.
    """

    def __init__(self, entry: DraftEntry, capacity: int, kind: DTypeLike) -> None:
        """Make an empty cache in ordinary memory."""
        shape = (1, entry.shape.num_kv_heads, capacity, entry.shape.head_dim)
        layers = range(entry.shape.num_layers)
        self.capacity = capacity
        self.names = [name for layer in layers for name in (names.past_key(layer), names.past_value(layer))]
        self.arrays: list[NDArray[np.floating]] = [np.zeros(shape, dtype=kind) for _ in self.names]

    def take(self, other: "SlotCache") -> None:
        """Copy the slots of a larger or smaller cache, as far as both have them."""
        size = min(self.capacity, other.capacity)
        for source, destination in zip(other.arrays, self.arrays, strict=True):
            destination[:, :, :size] = source[:, :, :size]


class CachePart(SlotCache):
    """One text's slots of a cache that several have; its arrays are views.

    Attributes:
        whole: that cache.
        first: its first slot there.
        requests: passes of the whole, by their shape.
    """

    def __init__(self, whole: SlotCache, first: int, capacity: int, requests: dict[Any, Any]) -> None:
        """Take `capacity` slots from `first` on."""
        self.whole, self.first, self.requests = whole, first, requests
        self.capacity, self.names = capacity, whole.names
        self.arrays = [array[:, :, first : first + capacity] for array in whole.arrays]


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
        self._source: Callable[[int, int], NDArray[np.float64]] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the request has no noise: all rows are zero."""
        return self._source is None

    def follow(self, source: Callable[[int, int], NDArray[np.float64]] | None) -> None:
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
