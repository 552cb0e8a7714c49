"""Making the draft's shapes runnable: from the cache on disk where it fits, by compiling otherwise.

Every compiled model lays the weights out for itself. A device that takes fixed shapes only, and a small draft on a
processor, get a model per static shape, which is the fastest; a larger draft on a processor gets one model for all
shapes, which costs a tenth of a pass and saves many copies of the weights (`bench/studies/draft_rounds.py` measures
both). On disk a processor's models have no weights of their own: all of them read the bundle's file.
"""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.devices.draft_passes import Shape, any_bucket, pass_buckets
from mirrorsd.devices.openvino.compiled_cache import CompiledCache, open_draft_cache
from mirrorsd.devices.openvino.draft_graph import DraftGraph, reason_in
from mirrorsd.devices.openvino.draft_pass import DraftRequest, Runnable, TensorCache
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS, is_shared
from mirrorsd.devices.openvino.npu_blobs import BundleBlobs
from mirrorsd.devices.slot_draft import DraftNoise
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.graphs.token_rows import TokenRows

_MOST_AHEAD_BYTES = 1 << 30


class DraftCompiler:
    """Compiled shapes of one draft on one placement, by (rows, tips, capacity).

    Two threads may use it: the draft worker, and the one that prepares a text's shapes. A shape that is there is never
    waited for. `on_progress` is told before each compilation.

    Attributes:
        graph: what is compiled.
        cache: keeps it on disk; None where nothing is kept.
        is_shared: whether one model is compiled for all shapes.
        buckets: the passes' rows and tips, smallest first.
    """

    def __init__(
        self,
        bundle: Path,
        entry: DraftEntry,
        placement: DraftPlacement,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.graph = graph = DraftGraph(bundle, entry, placement)
        self.cache = open_draft_cache(bundle, entry, placement, graph.core)
        self._ahead = BundleBlobs(bundle, graph.core) if graph.is_cut and not placement.emulated else None
        self.is_shared = is_shared(entry, placement, graph.weights.stat().st_size)
        self.buckets = pass_buckets(entry, placement, is_shared=self.is_shared)
        self._look_up = None if entry.embedding is None else TokenRows(bundle, entry.embedding)
        self._compiled: dict[str, Runnable] = {}
        self._compiling = threading.Lock()
        self._warm: set[Shape] = set()
        self._mapped: list[ov.Tensor] = []  # which must outlive the models that were taken back from them
        self._on_progress, self._num_compiled = on_progress, 0

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
                    host = self.graph.host_parts(*shape)
                    model = self._kept_in(self._ahead, name) or self._kept_in(self.cache, name) or self.compile(*shape)
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

    def joint_bucket(self, rows: int, tips: int, capacity: int) -> DraftBucket | None:
        """What a pass of several sessions is padded to; of fixed shapes, one that has been run."""
        if self.is_shared:
            return any_bucket(rows, tips)
        fitting = (bucket for bucket in self.buckets if bucket.rows >= rows and bucket.tips >= tips)
        return next((found for found in fitting if self.is_warm(found.rows, found.tips, capacity)), None)

    def new_cache(self, capacity: int) -> TensorCache:
        """An empty key/value cache, in the device's own tensors where it would otherwise be copied at every pass."""
        owner, entry = None, self.graph.entry
        if self.graph.is_cut:
            smallest = min(entry.buckets, key=lambda bucket: (bucket.rows, bucket.tips))
            owner = self.compiled(smallest.rows, smallest.tips, capacity).create_infer_request()
        with raised_as(DeviceError, f"No room for a draft's cache of {capacity} slots", OPENVINO_ERRORS):
            return TensorCache(entry, capacity, self.graph.cache_type, owner)

    def new_request(self, shape: Shape, cache: TensorCache) -> DraftRequest:
        """A request for passes of one shape, bound to a cache of that capacity."""
        runnable = self._runnable(shape)
        with raised_as(DeviceError, f"OpenVINO has no room for a draft's pass of {shape[0]} rows", OPENVINO_ERRORS):
            return self._request(runnable, shape, cache)

    def _request(self, runnable: Runnable, shape: Shape, cache: TensorCache) -> DraftRequest:
        has_tensors = not self.is_shared
        return DraftRequest(runnable, self.graph.entry, shape, cache, has_tensors=has_tensors, look_up=self._look_up)

    def fill_cache(self) -> None:
        """Compile whatever the cache lacks, so that no later request compiles; large drafts as they are needed."""
        for shape in self._shapes_ahead() if self.cache else []:
            name = self._name(shape)
            if self.cache and self.cache.is_writable and name not in self._compiled and not self.cache.has(name):
                self.compile(*shape)

    def _shapes_ahead(self) -> list[Shape]:
        """What is compiled before it is needed: every shape, or none of a draft that is large or has one model."""
        shapes = [(b.rows, b.tips, c) for c in sorted(self.graph.entry.capacities) for b in self.buckets]
        size = self.graph.weights.stat().st_size * len(shapes)
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
        compiled = self.graph.compile(*shape, is_shared=self.is_shared, chooses_tiles=self._ahead is not None)
        self._keep(shape, compiled)
        return compiled

    def _name(self, shape: Shape) -> str:
        return "all" if self.is_shared else "x".join(map(str, shape))

    def _kept_in(self, blobs: BundleBlobs | CompiledCache | None, name: str) -> ov.CompiledModel | None:
        """What was compiled before: ahead of time for the NPU at hand, or here; None where there is nothing."""
        blob = blobs.read(name) if blobs else None
        if blobs is None or blob is None:
            return None
        try:
            compiled = self.graph.take_back(blob)
        except OPENVINO_ERRORS as error:
            blobs.reject(f"{self.graph.device} does not take a blob back ({reason_in(error)})")
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
            self.cache.give_up(f"{self.graph.device} does not give its blobs ({reason_in(error)})")
            return
        blob = stream.getvalue()
        if self.graph.is_weightless and not self._says_the_same(shape, compiled, blob):
            self.cache.give_up(f"read back, a blob without weights differs from what {self.graph.device} compiled")
            return
        self.cache.write(self._name(shape), blob)

    def _says_the_same(self, shape: Shape, compiled: ov.CompiledModel, blob: bytes) -> bool:
        """Whether a blob that reads its weights from the bundle computes what was compiled, to the last bit."""
        try:
            read_back = self.graph.take_back(ov.Tensor(np.frombuffer(blob, np.uint8)))
        except OPENVINO_ERRORS:
            return False
        return self._trial(shape, compiled) == self._trial(shape, read_back)

    def _trial(self, shape: Shape, model: ov.CompiledModel) -> list[bytes]:
        """What a model makes of some tokens after an empty cache."""
        (rows, tips, capacity), entry = shape, self.graph.entry
        cache = TensorCache(entry, capacity, self.graph.cache_type)
        request = self._request(Runnable(model), shape, cache)
        tokens = [1 + number % (entry.shape.vocab_size - 1) for number in range(rows)]
        buffers = request.buffers
        buffers.inputs.fill([RowBlock(tokens, 0, 0)], range(rows - tips, rows))
        if entry.shape.num_noise_rows:
            request.use_noise(DraftNoise(entry.shape))
        request.infer()
        outputs: tuple[NDArray[Any], ...] = (buffers.tip_ids, buffers.tip_logprobs, *buffers.new_rows)
        return [output.tobytes() for output in outputs]
