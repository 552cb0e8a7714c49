"""A draft's pass on an NPU as one request: the host's part before it, the device's, the host's part after it.

The three share their tensors, so that nothing is copied between them. It is used like OpenVINO's own request.
"""

from typing import Any

import openvino as ov

from mirrorsd.devices.openvino.npu_graph import NpuParts, is_handed

_HOST_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}


class HostParts:
    """What the host does before and after a pass of one shape, compiled for its processor."""

    def __init__(self, core: ov.Core, parts: NpuParts, threads: int) -> None:
        options: dict[str, Any] = {**_HOST_OPTIONS, "INFERENCE_NUM_THREADS": threads}
        self.before = core.compile_model(parts.before, "CPU", options)
        self.after = core.compile_model(parts.after, "CPU", options)


class CutRequest:
    """The requests of all three parts; inputs and outputs are those of the whole draft."""

    def __init__(self, device: ov.CompiledModel, host: HostParts) -> None:
        self._device = device.create_infer_request()
        self._before, self._after = host.before.create_infer_request(), host.after.create_infer_request()
        self._owner: dict[str, ov.InferRequest] = {}
        for request in (self._after, self._device, self._before):
            model = request.get_compiled_model()
            for port in (*model.inputs, *model.outputs):
                # A plugin may give a port the names of what it has fused into it.
                self._owner |= dict.fromkeys(port.get_names(), request)
        self._share(self._before, self._device)
        self._share(self._device, self._after)
        self._share(self._before, self._after)

    def _share(self, first: ov.InferRequest, second: ov.InferRequest) -> None:
        """Let what `first` writes, and what both read, be one tensor."""
        one, other = first.get_compiled_model(), second.get_compiled_model()
        written = {name for port in one.outputs for name in port.get_names()}
        read = {name for port in one.inputs for name in port.get_names()}
        for port in other.inputs:
            name = port.get_any_name()
            if name in written and first is not self._device:
                first.set_tensor(name, second.get_tensor(name))
            elif name in written or (name in read and not is_handed(name)):
                second.set_tensor(name, first.get_tensor(name))

    def get_tensor(self, name: str) -> ov.Tensor:
        """The tensor of an input or output of the whole draft."""
        return self._owner[name].get_tensor(name)

    def set_tensor(self, name: str, tensor: ov.Tensor) -> None:
        """Bind a tensor to an input of the whole draft that one part alone has."""
        self._owner[name].set_tensor(name, tensor)

    def start_async(self) -> None:
        """Do the host's part, and start the device."""
        self._before.infer()
        self._device.start_async()

    def wait_for(self, milliseconds: int) -> bool:
        """Whether the device was done in time; then the host's part after it is done, too."""
        if not self._device.wait_for(milliseconds):
            return False
        self._after.infer()
        return True

    def cancel(self) -> None:
        """Give the device's part up."""
        self._device.cancel()
