"""Making the draft's shapes runnable: from the cache on disk where it fits, by compiling otherwise.

Every compiled model lays the weights out for itself. A device that takes fixed shapes only, and a small draft on a
processor, get a model per static shape, which is the fastest; a larger draft on a processor gets one model for all
shapes, which costs a tenth of a pass and saves many copies of the weights (`bench/studies/draft_rounds.py` measures
both). On disk a processor's models have no weights of their own: all of them read the bundle's file.
"""

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.openvino.compiled_cache import open_draft_cache
from mirrorsd.devices.openvino.draft_shapes import (
    OPENVINO_ERRORS,
    cache_type,
    device_options,
    host_options,
    is_shared,
    keep_small_constants,
    static_shapes,
    tile_options,
    weightless_options,
    with_cache_of,
)
from mirrorsd.devices.openvino.joined_attention import join_attention, pays_to_join
from mirrorsd.devices.openvino.npu_blobs import BundleBlobs
from mirrorsd.devices.openvino.npu_graph import NpuParts, cut_for_npu
from mirrorsd.devices.openvino.npu_request import HostParts
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.runtime.backends.openvino.draft_pass import DraftRequest, Runnable, TensorCache
from mirrorsd.runtime.backends.protocol import Progress, RowBlock
from mirrorsd.runtime.backends.slot_pass import DraftNoise, Shape, pass_buckets

_MOST_AHEAD_BYTES = 1 << 30


class DraftCompiler:
    """Compiled shapes of one draft on one placement, by (rows, tips, capacity).

    Two threads may use it: the draft worker, and the one that prepares a text's shapes. A shape that is there is never
    waited for. `on_progress` is told before each compilation.
    """

    def __init__(
        self, bundle: Path, entry: DraftEntry, placement: DraftPlacement, on_progress: Progress | None = None
    ) -> None:
        self.core = ov.Core()
        self._on_progress, self._num_compiled = on_progress, 0
        self.cache = open_draft_cache(bundle, entry, placement, self.core)
        is_npu = placement.device == "NPU" and not placement.emulated
        self._ahead = BundleBlobs(bundle, self.core) if is_npu else None
        self._path, self._entry, self._placement = bundle / entry.file, entry, placement
        self._device, options = device_options(placement)
        self._weightless = weightless_options(placement, self._path.with_suffix(".bin"))
        self._options = options | self._weightless
        if host := host_options(placement):
            self.core.set_property("CPU", host)
        self._cache_type = cache_type(self.core, entry, placement)
        self.is_shared = is_shared(entry, placement, self._path.with_suffix(".bin").stat().st_size)
        self.buckets = pass_buckets(entry, placement, is_shared=self.is_shared)
        self._look_up = None if entry.embedding is None else TokenRows(bundle, entry.embedding)
        self._compiled: dict[str, Runnable] = {}
        self._compiling = threading.Lock()
        self._warm: set[Shape] = set()
        # An imported model computes on the mapped file itself, so the mapping must outlive it.
        self._mapped: list[ov.Tensor] = []

    def compiled(self, rows: int, tips: int, capacity: int) -> ov.CompiledModel:
        """The compiled model for one static shape; from the cache, or compiled at first use.

        Raises:
            DeviceError: the device does not take it.
        """
        return self._runnable((rows, tips, capacity)).model

    def _runnable(self, shape: Shape) -> Runnable:
        name = self._name(shape)
        if name not in self._compiled:
            with self._compiling:
                if name not in self._compiled:
                    host = self._host_parts(shape) if self._placement.device == "NPU" else None
                    model = self._from_bundle(name) or self._from_cache(name) or self.compile(*shape)
                    self._compiled[name] = Runnable(model, host)
        return self._compiled[name]

    def is_warm(self, rows: int, tips: int, capacity: int) -> bool:
        """Whether this shape has been compiled and run."""
        return (rows, tips, capacity) in self._warm

    def warm_up(self, rows: int, tips: int, capacity: int) -> None:
        """Have this shape compiled and run once, so that its first real round pays nothing."""
        shape = (rows, tips, capacity)
        if shape not in self._warm:
            self.new_request(shape, self.new_cache(capacity)).infer()
            self._warm.add(shape)

    def new_cache(self, capacity: int) -> TensorCache:
        """An empty key/value cache, in the device's own tensors where it would otherwise be copied at every pass."""
        owner = None
        if self._placement.device == "NPU":
            smallest = min(self._entry.buckets, key=lambda bucket: (bucket.rows, bucket.tips))
            owner = self.compiled(smallest.rows, smallest.tips, capacity).create_infer_request()
        with raised_as(DeviceError, f"No room for a draft's cache of {capacity} slots", OPENVINO_ERRORS):
            return TensorCache(self._entry, capacity, self._cache_type, owner)

    def new_request(self, shape: Shape, cache: TensorCache) -> DraftRequest:
        """A request for passes of one shape, bound to a cache of that capacity."""
        runnable = self._runnable(shape)
        with raised_as(DeviceError, f"OpenVINO has no room for a draft's pass of {shape[0]} rows", OPENVINO_ERRORS):
            return self._request(runnable, shape, cache)

    def _request(self, runnable: Runnable, shape: Shape, cache: TensorCache) -> DraftRequest:
        has_tensors = not self.is_shared
        return DraftRequest(runnable, self._entry, shape, cache, has_tensors=has_tensors, look_up=self._look_up)

    def fill_cache(self) -> None:
        """Compile whatever the cache lacks, so that no later request compiles; large drafts as they are needed."""
        for shape in self._shapes_ahead() if self.cache else []:
            name = self._name(shape)
            if self.cache and self.cache.is_writable and name not in self._compiled and not self.cache.has(name):
                self.compile(*shape)

    def _shapes_ahead(self) -> list[Shape]:
        """What is compiled before it is needed: every shape, or none of a draft that is large or has one model."""
        shapes = [(b.rows, b.tips, c) for c in sorted(self._entry.capacities) for b in self.buckets]
        size = self._path.with_suffix(".bin").stat().st_size * len(shapes)
        return [] if self.is_shared or size > _MOST_AHEAD_BYTES else shapes

    def _tell(self) -> None:
        """Say that the next compilation begins."""
        if self._on_progress is not None:
            self._num_compiled += 1
            ahead = len(self._shapes_ahead()) if self.cache else 0
            total = max(ahead, 1 if self.is_shared else len(self.buckets), self._num_compiled)
            once = ", once" if self.cache is not None and self.cache.is_writable else ""
            words = f"compiling the draft{once}: {self._num_compiled} of {total}"
            self._on_progress(words, (self._num_compiled - 1) / total)

    def compile(self, rows: int, tips: int, capacity: int) -> ov.CompiledModel:
        """Compile one static shape (or what stands for it) and keep it on disk.

        Raises:
            DeviceError: the device does not take it.
        """
        self._tell()
        shape = (rows, tips, capacity)
        model = self._read() if self.is_shared else self.device_model(*shape)
        longest = max(self._entry.capacities) if self.is_shared else capacity
        if self._weightless:
            keep_small_constants(model)
        if pays_to_join(self._entry.shape, self._placement, longest, self._cache_type):
            join_attention(model)
        try:
            if self._placement.device != "NPU":
                model = with_cache_of(model, self._entry, self._cache_type)
            tiles = tile_options(model) if self._ahead else {}
            compiled = self.core.compile_model(model, self._device, self._options | tiles)
        except OPENVINO_ERRORS as error:
            raise DeviceError(
                f"OpenVINO could not compile the draft for {self._device} "
                f"({rows} rows, {tips} tips, {capacity} slots): {error}"
            ) from error
        self._keep(shape, compiled)
        return compiled

    def static_model(self, rows: int, tips: int, capacity: int) -> ov.Model:
        """The draft's graph with numbers for `N`, `R` and `C`.

        Raises:
            DeviceError: OpenVINO cannot read it, or not with these shapes.
        """
        model = self._read()
        try:
            model.reshape(static_shapes(self._entry, rows, tips, capacity))
        except OPENVINO_ERRORS as error:
            raise DeviceError(
                f"OpenVINO cannot read the draft as {rows} rows, {tips} tips, {capacity} slots: {error}"
            ) from error
        return model

    def device_model(self, rows: int, tips: int, capacity: int) -> ov.Model:
        """What the device computes of one static shape: for an NPU its part alone.

        Raises:
            DeviceError: OpenVINO cannot read it, or not with these shapes.
        """
        if self._placement.device != "NPU":
            return self.static_model(rows, tips, capacity)
        return self._parts((rows, tips, capacity)).core

    def _parts(self, shape: Shape) -> NpuParts:
        return cut_for_npu(self.static_model(*shape), self._entry.shape, self._cache_type)

    def _host_parts(self, shape: Shape) -> HostParts:
        with raised_as(DeviceError, "OpenVINO cannot compile the host's part of a pass", OPENVINO_ERRORS):
            return HostParts(self.core, self._parts(shape), self._placement.threads)

    def _read(self) -> ov.Model:
        try:
            return self.core.read_model(self._path)
        except OPENVINO_ERRORS as error:
            raise DeviceError(
                f"OpenVINO cannot read the draft: {str(error).strip()} Export the bundle again."
            ) from error

    def _name(self, shape: Shape) -> str:
        return "all" if self.is_shared else "x".join(map(str, shape))

    def _from_bundle(self, name: str) -> ov.CompiledModel | None:
        """What was compiled ahead for the NPU at hand, if anything."""
        blob = self._ahead.read(name) if self._ahead else None
        if self._ahead is None or blob is None:
            return None
        try:
            compiled = self.core.import_model(blob, self._device, self._options)
        except OPENVINO_ERRORS as error:
            self._ahead.reject(f"{self._device} does not take one ({_reason_in(error)})")
            return None
        self._mapped.append(blob)
        return compiled

    def _from_cache(self, name: str) -> ov.CompiledModel | None:
        blob = self.cache.read(name) if self.cache else None
        if self.cache is None or blob is None:
            return None
        try:
            compiled = self.core.import_model(blob, self._device, self._options)
        except OPENVINO_ERRORS as error:
            self.cache.reject(f"{self._device} does not take a blob back ({_reason_in(error)})")
            return None
        self._mapped.append(blob)
        return compiled

    def _keep(self, shape: Shape, compiled: ov.CompiledModel) -> None:
        if self.cache is None or not self.cache.is_writable:
            return
        stream = io.BytesIO()
        try:
            compiled.export_model(stream)
        except OPENVINO_ERRORS as error:
            self.cache.give_up(f"{self._device} does not give its blobs ({_reason_in(error)})")
            return
        blob = stream.getvalue()
        if self._weightless and not self._says_the_same(shape, compiled, blob):
            self.cache.give_up(f"read back, a blob without weights differs from what {self._device} compiled")
            return
        self.cache.write(self._name(shape), blob)

    def _says_the_same(self, shape: Shape, compiled: ov.CompiledModel, blob: bytes) -> bool:
        """Whether a blob that reads its weights from the bundle computes what was compiled, to the last bit."""
        try:
            read_back = self.core.import_model(ov.Tensor(np.frombuffer(blob, np.uint8)), self._device, self._options)
        except OPENVINO_ERRORS:
            return False
        return self._trial(shape, compiled) == self._trial(shape, read_back)

    def _trial(self, shape: Shape, model: ov.CompiledModel) -> list[bytes]:
        """What a model makes of some tokens after an empty cache."""
        rows, tips, capacity = shape
        cache = TensorCache(self._entry, capacity, self._cache_type)
        request = self._request(Runnable(model), shape, cache)
        tokens = [1 + number % (self._entry.shape.vocab_size - 1) for number in range(rows)]
        buffers = request.buffers
        buffers.inputs.fill([RowBlock(tokens, 0, 0)], range(rows - tips, rows))
        if self._entry.shape.num_noise_rows:
            request.use_noise(DraftNoise(self._entry.shape))
        request.infer()
        outputs: tuple[NDArray[Any], ...] = (buffers.tip_ids, buffers.tip_logprobs, *buffers.new_rows)
        return [output.tobytes() for output in outputs]


def _reason_in(error: Exception) -> str:
    """The last line of a vendor's message says what is wrong; those before it say where in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
