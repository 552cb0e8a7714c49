"""The draft on OpenVINO (CPU, GPU, NPU, or the NPU plugin's wrapper on the CPU).

One IR with symbolic `N`, `R`, `C` is made static for each (rows, tips, capacity) that is used (`draft_cache` keeps the
results on disk). The key/value cache is host memory shared with all compiled shapes of one capacity; a text that
outgrows it moves to the next capacity, which `prepare` has compiled before the first token.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.runtime.draft_compiler import DraftCompiler, run_request
from mirrorsd.runtime.draft_rows import DraftInputs
from mirrorsd.runtime.draft_session import RowBlock, TipGuesses


class OpenVinoDraftModel:
    """The draft's compiled static shapes, shared by all sessions. Use it on the draft worker's thread."""

    def __init__(self, bundle: Path, entry: DraftEntry, placement: DraftPlacement) -> None:
        self.entry, self.placement = entry, placement
        self.shapes = DraftCompiler(bundle, entry, placement)

    def new_session(self) -> "OpenVinoDraft":
        """A session with a cache of its own on the shared compiled shapes."""
        return OpenVinoDraft(self)

    def describe(self) -> str:
        """One line for `pipe.placement`."""
        placement = self.placement
        where = f"{placement.device}{' (emulated on CPU)' if placement.emulated else ''}"
        return f"draft: openvino {where}, {placement.precision}, {placement.threads} thread(s)"


class OpenVinoDraft:
    """A `DraftSession` on an OpenVINO device: one cache, and the requests bound to it."""

    def __init__(self, model: OpenVinoDraftModel) -> None:
        entry = model.entry
        self.shape = entry.shape
        decode = [bucket for bucket in entry.buckets if bucket.tips > 1] or list(entry.buckets)
        self.round_sizes = tuple(sorted({bucket.rows for bucket in decode}))
        self.max_tips = max(bucket.tips for bucket in decode)
        self.prefill_rows = max(bucket.rows for bucket in entry.buckets)
        self.capacity = max(entry.capacities)
        self._buckets = sorted(entry.buckets, key=lambda bucket: (bucket.rows, bucket.tips))
        self._capacities = sorted(entry.capacities)
        self._model = model
        self._requests: dict[tuple[int, int, int], _BoundRequest] = {}
        self._cache = _HostCache(entry, self._capacities[0])
        self._entry = entry
        self._last: _BoundRequest | None = None

    def warm_up(self) -> None:
        """Run every bucket at the first capacity once, so that the first request pays nothing; fill the cache."""
        self.prepare(1)
        self._model.shapes.fill_cache()

    def prepare(self, num_slots: int) -> None:
        """See `DraftSession.prepare`."""
        for capacity in self._capacities:
            for bucket in self._buckets:
                self._model.shapes.warm_up(bucket.rows, bucket.tips, capacity)
            if capacity >= num_slots:
                return

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """See `DraftSession.run`."""
        num_rows = sum(len(block.tokens) for block in blocks)
        self._reserve(max(_slots_needed(block) for block in blocks))
        request = self._request(self._smallest_bucket(num_rows, len(tip_rows)))
        request.inputs.fill(blocks, tip_rows)
        request.infer()
        self._last = request
        count = len(tip_rows)
        return TipGuesses(request.tip_ids[:count], request.tip_logprobs[:count])

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """See `DraftSession.keep_rows`."""
        if not len(slots) or self._last is None:
            return
        self._reserve(max(slots) + 1)
        row_index, slot_index = np.asarray(rows), np.asarray(slots)
        for cached, new in zip(self._cache.arrays, self._last.new_rows, strict=True):
            cached[0][:, slot_index] = new[0][:, row_index]

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `DraftSession.move_slots`."""
        source_index, destination_index = np.asarray(sources), np.asarray(destinations)
        for cached in self._cache.arrays:
            cached[0][:, destination_index] = cached[0][:, source_index]

    def close(self) -> None:
        """Drop requests and cache."""
        self._requests.clear()
        self._last = None

    def _reserve(self, num_slots: int) -> None:
        """Move to the smallest capacity that holds `num_slots`."""
        if num_slots <= self._cache.capacity:
            return
        fitting = [capacity for capacity in self._capacities if capacity >= num_slots]
        if not fitting:
            raise DeviceError(f"The draft needs {num_slots} cache slots; this bundle has at most {self.capacity}.")
        self._cache = self._cache.grown(self._entry, fitting[0])
        for request in self._requests.values():
            request.bind_cache_if_fitting(self._cache)

    def _smallest_bucket(self, num_rows: int, num_tips: int) -> DraftBucket:
        for bucket in self._buckets:
            if bucket.rows >= num_rows and bucket.tips >= num_tips:
                return bucket
        raise DeviceError(f"No draft bucket takes {num_rows} rows and {num_tips} tips.")

    def _request(self, bucket: DraftBucket) -> "_BoundRequest":
        key = (bucket.rows, bucket.tips, self._cache.capacity)
        if key not in self._requests:
            self._requests[key] = _BoundRequest(self._model.shapes.compiled(*key), self._entry, self._cache)
        return self._requests[key]


class _HostCache:
    """Key and value caches of all layers, `[1, kvh, C, hd]` each, key and value in turn."""

    def __init__(self, entry: DraftEntry, capacity: int) -> None:
        shape = (1, entry.shape.num_kv_heads, capacity, entry.shape.head_dim)
        self.capacity = capacity
        self.names = [
            name for layer in range(entry.shape.num_layers) for name in (names.past_key(layer), names.past_value(layer))
        ]
        self.arrays: list[NDArray[np.floating]] = [np.zeros(shape, dtype=entry.shape.dtype) for _ in self.names]
        self.tensors = [ov.Tensor(array, shared_memory=True) for array in self.arrays]

    def grown(self, entry: DraftEntry, capacity: int) -> "_HostCache":
        """A larger cache with the same contents."""
        larger = _HostCache(entry, capacity)
        for old, new in zip(self.arrays, larger.arrays, strict=True):
            new[:, :, : self.capacity] = old
        return larger


class _BoundRequest:
    """One compiled shape with its inputs, outputs and cache bound once."""

    def __init__(self, compiled: ov.CompiledModel, entry: DraftEntry, cache: _HostCache) -> None:
        self._request = compiled.create_infer_request()
        self._capacity = cache.capacity
        views = {name: self._request.get_tensor(name).data for name in _HOST_INPUTS}
        self.inputs = DraftInputs(*(views[name] for name in _HOST_INPUTS))
        self.bind_cache_if_fitting(cache)
        self.tip_ids: NDArray[np.int64] = self._request.get_tensor(names.DRAFT_TIP_IDS).data
        self.tip_logprobs: NDArray[np.float32] = self._request.get_tensor(names.DRAFT_TIP_LOGPROBS).data
        layers = range(entry.shape.num_layers)
        new_names = [name for layer in layers for name in (names.new_key(layer), names.new_value(layer))]
        self.new_rows = [self._request.get_tensor(name).data for name in new_names]

    def bind_cache_if_fitting(self, cache: _HostCache) -> None:
        """Use `cache` if it has this shape's capacity."""
        if cache.capacity == self._capacity:
            for name, tensor in zip(cache.names, cache.tensors, strict=True):
                self._request.set_tensor(name, tensor)

    def infer(self) -> None:
        """Run the pass (the calling thread waits; other Python threads go on)."""
        run_request(self._request)


_HOST_INPUTS = (names.DRAFT_IDS, names.DRAFT_POSITIONS, names.DRAFT_MASK, names.DRAFT_TIP_ROWS)


def _slots_needed(block: RowBlock) -> int:
    return max([block.chain_visible, *(slot + 1 for slot in block.extra_slots)])
