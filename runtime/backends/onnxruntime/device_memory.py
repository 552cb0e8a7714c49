"""Memory of a device that ONNX Runtime's Python interface can neither reserve nor copy: only a graph can.

Owns: two graphs of one operator each, on the provider itself. `Expand` of a zero reserves, `Identity` copies to the
host.
"""

import functools
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.runtime.backends.onnxruntime.providers import provider_options, session_options
from mirrorsd.runtime.backends.onnxruntime.small_graphs import ONNX_TYPES, Port, model, node

_INT64 = ONNX_TYPES["int64"]
_NAMES = {number: name for name, number in ONNX_TYPES.items()}


class DeviceMemory:
    """What is reserved and read through graphs on one provider."""

    def __init__(self, placement: TargetPlacement, kind: str) -> None:
        self._placement, self._kind = placement, kind

    def zeros(self, shape: tuple[int, ...], dtype: str) -> ort.OrtValue:
        """Reserve a tensor of zeros on the device."""
        kind = ONNX_TYPES[dtype]
        session = _session(
            self._placement, _graph("Expand", [("in", kind, 1), ("shape", _INT64, 1)], ("out", kind, len(shape)))
        )
        binding = session.io_binding()
        binding.bind_cpu_input("in", np.zeros(1, dtype))
        binding.bind_cpu_input("shape", np.array(shape, np.int64))
        binding.bind_output("out", self._kind)
        session.run_with_iobinding(binding)
        reserved: ort.OrtValue = binding.get_outputs()[0]
        return reserved

    def read(self, value: ort.OrtValue) -> NDArray[Any]:
        """Copy a tensor of the device to the host."""
        kind, shape = value.element_type(), value.shape()
        session = _session(self._placement, _graph("Identity", [("in", kind, len(shape))], ("out", kind, len(shape))))
        host = np.empty(shape, _NAMES[kind])
        binding = session.io_binding()
        binding.bind_ortvalue_input("in", value)
        binding.bind_ortvalue_output("out", ort.OrtValue.ortvalue_from_numpy(host))
        session.run_with_iobinding(binding)
        return host


@functools.cache
def _session(placement: TargetPlacement, graph: bytes) -> ort.InferenceSession:
    """Opened when needed first, never closed: memory that outlived its session would take the process along."""
    providers = [(placement.provider, provider_options(placement))]
    return ort.InferenceSession(graph, session_options(placement), providers=providers, enable_fallback=0)


def _graph(operator: str, inputs: list[Port], output: Port) -> bytes:
    """A model of one operator."""
    return model([node(operator, [name for name, _, _ in inputs], [output[0]])], inputs, [output])
