"""A pass of the draft on OpenVINO: a request of one shape, with inputs, outputs, noise and cache bound once.

The cache is bound and never copied by us. A pass is started and then waited for, for so long and no longer: a device
that hangs is an error, not a hung program.
"""

import threading

import openvino as ov

from mirrorsd.devices.draft_memory import SlotCache
from mirrorsd.devices.draft_passes import Shape, host_arrays, host_ports
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS, numpy_type, tensor_on
from mirrorsd.devices.openvino.npu_request import CutRequest, HostParts
from mirrorsd.devices.slot_draft import DraftNoise, PassBuffers
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import draft_contract
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.token_rows import TokenRows

PASS_LIMIT_S = 30.0
"""Far above any pass: what takes longer hangs. Waiting for a late draft is the scheduler's business, not this."""


class TensorCache(SlotCache):
    """A cache in OpenVINO's tensors.

    Attributes:
        kind: what it is kept in. numpy has no bf16: its numbers are moved about as float16, bit by bit.
        tensors: on the memory of `arrays`.
    """

    def __init__(self, entry: DraftEntry, capacity: int, kind: ov.Type, owner: ov.InferRequest | None = None) -> None:
        """Make an empty cache: in the tensors of `owner`, a request of that capacity, or in ordinary memory.

        An NPU computes on its own requests' tensors; from ordinary memory it would copy the cache at every pass.
        """
        super().__init__(entry, capacity, numpy_type(kind))
        self.kind = kind
        self.tensors = [tensor_on(array, kind) for array in self.arrays]
        if owner is not None:
            self.tensors = [owner.get_tensor(name) for name in self.names]
            self.arrays = [tensor.data for tensor in self.tensors]
            for array in self.arrays:
                array.fill(0)


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


class DraftRequest:
    """A request for passes of one shape, with inputs, outputs and cache bound once."""

    def __init__(
        self,
        runnable: Runnable,
        entry: DraftEntry,
        shape: Shape,
        cache: TensorCache,
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
        self._must_outlive = not has_tensors
        self.capacity = shape[2]
        contract = draft_contract(entry.shape)
        if has_tensors:
            arrays = {name: self._request.get_tensor(name).data for name in host_ports(contract)}
        else:
            arrays = host_arrays(contract, shape, numpy_type(cache.kind))
            for name, array in arrays.items():
                kind = cache.kind if names.is_new(name) else ov.Type(array.dtype)
                self._request.set_tensor(name, tensor_on(array, kind))
        self._arrays = arrays  # OpenVINO does not keep alive what a tensor of the host's memory lies in
        self.buffers = PassBuffers(entry, arrays, look_up)
        self._noise: DraftNoise | None = None
        self.bind(cache)

    def bind(self, cache: TensorCache) -> None:
        """Use `cache` if it has this shape's capacity."""
        if cache.capacity == self.capacity:
            self._cache = cache
            for name, tensor in zip(cache.names, cache.tensors, strict=True):
                self._request.set_tensor(name, tensor)

    def use_noise(self, noise: DraftNoise) -> None:
        """Read this noise from now on."""
        if self._noise is not noise:
            self._noise = noise
            self._request.set_tensor(names.DRAFT_NOISE, ov.Tensor(noise.rows, shared_memory=True))

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
