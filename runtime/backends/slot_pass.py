"""What a draft's passes are made of, whichever runtime computes them: inputs, outputs, noise and caches of the host.

A pass has one shape: so many rows, tips and slots. Its inputs are written in place, and outputs land where they are
read. Does not own: how a pass is computed (`openvino/draft_pass`, `onnxruntime/draft`), which one is (`slot_draft`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape, StageContract
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.runtime.backends.protocol import RowBlock
from mirrorsd.runtime.sampling.chooser import NoiseSource

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
            mask[row:stop, : block.chain_visible] = 0.0
            if block.extra_slots:
                mask[row:stop, list(block.extra_slots)] = 0.0
            if block.lead_rows:
                mask[row:stop, capacity : capacity + block.lead_rows] = 0.0
            mask[row:stop, capacity + row : capacity + stop] = self._causal[:size, :size]
            row = stop
        if row < self.num_rows:
            self._ids[row:] = 0
            self._positions[row:] = 0
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
        self._noise_rows: NDArray[np.int64] = arrays.get(names.DRAFT_NOISE_ROWS, np.zeros(0, dtype=np.int64))
        self.tip_ids: NDArray[np.int64] = arrays[names.DRAFT_TIP_IDS]
        self.tip_logprobs: NDArray[np.float32] = arrays[names.DRAFT_TIP_LOGPROBS]
        layers = range(entry.shape.num_layers)
        self.new_rows: list[NDArray[np.floating]] = [
            arrays[name] for layer in layers for name in (names.new_key(layer), names.new_value(layer))
        ]
        self.inputs.fill([], [])  # what any device can run: no row sees more than itself
        self._noise_rows.fill(0)

    def name_noise(self, noise: DraftNoise, num_tips: int) -> None:
        """Let the tips' candidates compete with the noise of the positions that they predict."""
        if not noise.is_silent:  # else, whichever rows are named
            ahead = 1 + np.arange(self._noise_rows.shape[1])
            self._noise_rows[:num_tips] = noise.rows_at(self.inputs.tip_positions(num_tips)[:, None] + ahead)
