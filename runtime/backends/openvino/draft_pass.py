"""A pass of the draft on OpenVINO: a request of one shape, with inputs, outputs, noise and cache bound once.

Inputs are written in place, the cache is bound and never copied by us, outputs land where the host reads them. A pass
is started and then waited for, for so long and no longer: a device that hangs is an error, not a hung program.
"""

import threading
from collections.abc import Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape, draft_contract
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.runtime.backends.openvino.draft_shapes import (
    OPENVINO_ERRORS,
    Shape,
    SlotCache,
    host_arrays,
    host_ports,
    is_cached,
    tensor_on,
)
from mirrorsd.runtime.backends.openvino.npu_request import CutRequest, HostParts
from mirrorsd.runtime.backends.protocol import RowBlock
from mirrorsd.runtime.sampling.chooser import NoiseSource

PASS_LIMIT_S = 30.0
"""Far above any pass: what takes longer hangs. Waiting for a late draft is the scheduler's business, not this."""


class Runnable:
    """A compiled model, and whatever its last pass ran on, if its shapes are symbolic.

    The CPU plugin keeps one graph per model for all its requests, and a graph of symbolic shapes looks at the memory of
    the pass before while it prepares the next one: that memory must not be gone (OpenVINO 2026.4 crashes). So passes
    of a model run one after another, whichever thread they come from.
    """

    def __init__(self, model: ov.CompiledModel, host: HostParts | None = None) -> None:
        """Keep `model`; `host` is what the host does before and after it, where it is the device's part alone."""
        self.model = model
        self.running = threading.Lock()
        self.last_run: object = None
        self._host = host

    def new_request(self) -> ov.InferRequest | CutRequest:
        """A request for whole passes."""
        return self.model.create_infer_request() if self._host is None else CutRequest(self.model, self._host)


class DraftNoise:
    """One session's noise of sampling `[P, V]`, in a tensor that all of its requests share.

    Position `p` has row `p % P`. A row that holds another position's noise is written when it is asked for. With no
    source, all rows are zero: the likeliest tokens are best.
    """

    def __init__(self, shape: DraftShape) -> None:
        """Make zeros; `shape` has noise rows."""
        self._rows = np.zeros((shape.num_noise_rows, shape.vocab_size), dtype=np.float32)
        self._positions = np.full(shape.num_noise_rows, -1, dtype=np.int64)
        self._source: NoiseSource | None = None
        self.tensor = ov.Tensor(self._rows, shared_memory=True)

    @property
    def is_silent(self) -> bool:
        """Whether the request has no noise: all rows are zero."""
        return self._source is None

    @property
    def rows(self) -> NDArray[np.float32]:
        """The memory of `tensor`."""
        return self._rows

    def follow(self, source: NoiseSource | None) -> None:
        """Begin a request whose noise comes from `source`, or one without noise."""
        if self._source is not None:
            self._rows.fill(0.0)
        self._positions.fill(-1)
        self._source = source

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that hold the noise of `positions`, of the same shape; writes those that are missing.

        With 4 rows, positions 5 and 8 have rows 1 and 0.
        """
        num_rows, vocab_size = self._rows.shape
        rows = positions % num_rows
        if self._source is not None:
            for position in np.unique(positions[self._positions[rows] != positions]).tolist():
                self._rows[position % num_rows] = self._source(position, vocab_size)
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


class DraftRequest:
    """A request for passes of one shape, with inputs, outputs and cache bound once."""

    def __init__(
        self,
        runnable: Runnable,
        entry: DraftEntry,
        shape: Shape,
        cache: SlotCache,
        *,
        has_tensors: bool,
        look_up: TokenRows | None = None,
    ) -> None:
        """Bind a request of `runnable`.

        Args:
            runnable: The compiled model.
            entry: The draft.
            shape: What the passes are padded to.
            cache: A cache of that capacity.
            has_tensors: Whether the request has tensors of its own, as one of fixed shapes has; otherwise they are
                made here.
            look_up: Gives the tokens' rows, where the draft has none of its own.
        """
        self._runnable = runnable
        self._request = runnable.new_request()
        self._cache = cache
        self._must_outlive = not has_tensors
        self.capacity = shape[2]
        contract = draft_contract(entry.shape)
        if has_tensors:
            arrays = {name: self._request.get_tensor(name).data for name in host_ports(contract)}
        else:
            arrays = host_arrays(contract, shape, cache.kind)
            for name, array in arrays.items():
                kind = cache.kind if is_cached(name) else ov.Type(array.dtype)
                self._request.set_tensor(name, tensor_on(array, kind))
        self._arrays = arrays  # OpenVINO does not keep alive what a tensor of the host's memory lies in
        self.bind(cache)
        self.inputs = DraftInputs(
            ids=arrays[names.DRAFT_IDS],
            positions=arrays[names.DRAFT_POSITIONS],
            mask=arrays[names.DRAFT_MASK],
            tip_rows=arrays[names.DRAFT_TIP_ROWS],
            rows=arrays.get(names.DRAFT_TOKEN_ROWS),
            look_up=look_up,
        )
        self._noise: DraftNoise | None = None
        self._noise_rows: NDArray[np.int64] = arrays.get(names.DRAFT_NOISE_ROWS, np.zeros(0, dtype=np.int64))
        self.tip_ids: NDArray[np.int64] = arrays[names.DRAFT_TIP_IDS]
        self.tip_logprobs: NDArray[np.float32] = arrays[names.DRAFT_TIP_LOGPROBS]
        layers = range(entry.shape.num_layers)
        self.new_rows = [arrays[name] for layer in layers for name in (names.new_key(layer), names.new_value(layer))]
        self.clear()

    def clear(self) -> None:
        """Set the inputs to what any device can run: no row sees more than itself."""
        self.inputs.fill([], [])
        self._noise_rows.fill(0)

    def bind(self, cache: SlotCache) -> None:
        """Use `cache` if it has this shape's capacity."""
        if cache.capacity == self.capacity:
            self._cache = cache
            for name, tensor in zip(cache.names, cache.tensors, strict=True):
                self._request.set_tensor(name, tensor)

    def use_noise(self, noise: DraftNoise, num_tips: int) -> None:
        """Let the tips' candidates compete with the noise of the positions that they predict."""
        if self._noise is not noise:
            self._noise = noise
            self._request.set_tensor(names.DRAFT_NOISE, noise.tensor)
        if noise.is_silent:  # whichever rows are named
            return
        ahead = 1 + np.arange(self._noise_rows.shape[1])
        self._noise_rows[:num_tips] = noise.rows_at(self.inputs.tip_positions(num_tips)[:, None] + ahead)

    def infer(self, limit_s: float = PASS_LIMIT_S) -> None:
        """Run the pass; the calling thread waits, other Python threads go on.

        Raises:
            DeviceError: the device failed, or did not finish within `limit_s`.
        """
        with self._runnable.running:
            run_request(self._request, limit_s)
            if self._must_outlive:
                self._runnable.last_run = (self, self._cache)


def run_request(request: ov.InferRequest | CutRequest, limit_s: float = PASS_LIMIT_S) -> None:
    """Start a request and wait for it.

    Raises:
        DeviceError: the device failed, or did not finish within `limit_s`.
    """
    try:
        request.start_async()
        # Twice half the time: a program that was stopped for long, by its user or a closed lid, is not a hung device.
        if any(request.wait_for(int(500 * limit_s)) for _ in range(2)):
            return
        request.cancel()
    except OPENVINO_ERRORS as error:
        raise DeviceError(f"OpenVINO failed while running the draft: {error}") from error
    raise DeviceError(f"OpenVINO's device did not finish a draft pass within {limit_s:g} s; the pass was cancelled.")
