"""A draft in products of integers, or in blocks of four bits, on ONNX Runtime's processor kernels: one graph for all.

A round of a draft on a processor takes what its weights' bytes take, and what its rows' products do. OpenVINO has to
unpack integers before it multiplies (`bench/studies/draft_rounds.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.device_maps.card import TargetPlacement
from mirrorsd.devices.draft_memory import SlotCache
from mirrorsd.devices.draft_passes import Shape, any_bucket, host_arrays, pass_buckets
from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage, run_options
from mirrorsd.devices.slot_draft import DraftNoise, PassBuffers, SlotDraft
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import draft_contract
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.runtime.backends.draft_room import DraftRoom
from mirrorsd.runtime.backends.joint_rounds import JointRounds


class OnnxDraftModel:
    """The draft's graph, shared by all sessions. Use it on the draft worker's thread."""

    def __init__(self, bundle: Path, entry: DraftEntry, placement: DraftPlacement) -> None:
        """Open the graph.

        Raises:
            BundleError: the file is missing or damaged.
            DeviceError: ONNX Runtime does not take it.
        """
        self.entry, self._placement = entry, placement
        device = OnnxDevice(TargetPlacement(threads=placement.threads, cores=placement.cores))
        look_up = None if entry.embedding is None else TokenRows(bundle, entry.embedding)
        self.shapes = OnnxDraftShapes(entry, device.open(bundle / entry.file, "float32"), placement, look_up)
        self.rounds = JointRounds(DraftRoom(entry, self.shapes), takes_any=True)

    def new_session(self) -> SlotDraft:
        """A session with a cache of its own."""
        return SlotDraft(self)

    def describe(self) -> str:
        """One line for `pipe.placement`."""
        return f"draft: onnxruntime CPU, {self.entry.precision}, {self._placement.threads} thread(s)"


class OnnxDraftShapes:
    """Passes of every shape on one graph: nothing is compiled, so that all are ready at once."""

    def __init__(
        self, entry: DraftEntry, stage: OnnxStage, placement: DraftPlacement, look_up: TokenRows | None
    ) -> None:
        self.buckets: list[DraftBucket] = pass_buckets(entry, placement, is_shared=True)
        self._entry, self._stage, self._look_up = entry, stage, look_up
        self._warm: set[Shape] = set()

    def is_warm(self, rows: int, tips: int, capacity: int) -> bool:
        """Whether this shape has been run."""
        return (rows, tips, capacity) in self._warm

    def warm_up(self, rows: int, tips: int, capacity: int) -> None:
        """Have this shape run once."""
        if not self.is_warm(rows, tips, capacity):
            self.new_request((rows, tips, capacity), self.new_cache(capacity)).infer()
            self._warm.add((rows, tips, capacity))

    def fill_cache(self) -> None:
        """Nothing is kept on disk."""

    def joint_bucket(self, rows: int, tips: int, capacity: int) -> DraftBucket:
        """What a pass of several sessions is padded to."""
        return any_bucket(rows, tips)

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty key/value cache."""
        return SlotCache(self._entry, capacity, np.float32)

    def new_request(self, shape: Shape, cache: SlotCache) -> "OnnxDraftRequest":
        """A request for passes of one shape, bound to a cache of that capacity."""
        with raised_as(DeviceError, f"ONNX Runtime has no room for a draft's pass of {shape[0]} rows", ONNX_ERRORS):
            return OnnxDraftRequest(self._stage, self._entry, shape, cache, self._look_up)


class OnnxDraftRequest:
    """Passes of one shape, with inputs, outputs and cache bound once."""

    def __init__(
        self, stage: OnnxStage, entry: DraftEntry, shape: Shape, cache: SlotCache, look_up: TokenRows | None = None
    ) -> None:
        contract = draft_contract(entry.shape)
        self._stage, self._capacity = stage, shape[2]
        self._binding, self._options = stage.session.io_binding(), run_options(None, has_queue=False)
        # The binding's values lie in these arrays' memory.
        self._arrays: dict[str, NDArray[Any]] = host_arrays(contract, shape, np.float32)
        outputs = {spec.name for spec in contract.outputs}
        for name, array in self._arrays.items():
            bind = self._binding.bind_ortvalue_output if name in outputs else self._binding.bind_ortvalue_input
            bind(name, ort.OrtValue.ortvalue_from_numpy(array))
        self.buffers = PassBuffers(entry, self._arrays, look_up)
        self._noise: DraftNoise | None = None
        self.bind(cache)

    def bind(self, cache: SlotCache) -> None:
        """Use `cache` if it has this shape's capacity."""
        if cache.capacity == self._capacity:
            self._cache = cache
            for name, array in zip(cache.names, cache.arrays, strict=True):
                self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def use_noise(self, noise: DraftNoise) -> None:
        """Read this noise from now on."""
        if self._noise is not noise:
            self._noise = noise
            self._binding.bind_ortvalue_input(names.DRAFT_NOISE, ort.OrtValue.ortvalue_from_numpy(noise.rows))

    def infer(self) -> None:
        """Run the pass; other Python threads go on.

        Raises:
            DeviceError: ONNX Runtime failed.
        """
        self._stage.run(self._binding, self._options)
