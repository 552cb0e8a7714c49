"""Memory of a device that ONNX Runtime's Python interface can neither reserve nor copy: only a graph can.

Owns: two graphs of one operator each, on the provider itself. `Expand` of a zero reserves, `Identity` copies to the
host. They are written here byte by byte (protocol buffers, onnx.proto), since what runs bundles has no `onnx` package.
"""

import functools
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.runtime.backends.onnxruntime.providers import provider_options, session_options

_IR_VERSION, _OPSET = 10, 18
_INT64 = 7
_ONNX_TYPES = {"float32": 1, "int32": 6, "int64": _INT64, "float16": 10}
_NAMES = {number: name for name, number in _ONNX_TYPES.items()}


class DeviceMemory:
    """What is reserved and read through graphs on one provider."""

    def __init__(self, placement: TargetPlacement, kind: str) -> None:
        self._placement, self._kind = placement, kind

    def zeros(self, shape: tuple[int, ...], dtype: str) -> ort.OrtValue:
        """Reserve a tensor of zeros on the device."""
        kind = _ONNX_TYPES[dtype]
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


Port = tuple[str, int, int]
"""Name, type of the elements, number of dimensions."""


def _graph(operator: str, inputs: list[Port], output: Port) -> bytes:
    """A model of one operator."""
    node = b"".join(_field(1, name) for name, _, _ in inputs) + _field(2, output[0]) + _field(4, operator)
    ports = b"".join(_field(11, _port(*port)) for port in inputs) + _field(12, _port(*output))
    graph = _field(1, node) + _field(2, operator) + ports
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(1, "") + _field(2, _OPSET))


def _port(name: str, kind: int, rank: int) -> bytes:
    dimensions = b"".join(_field(1, _field(2, f"{name}{number}")) for number in range(rank))
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, dimensions)))


def _field(number: int, content: int | str | bytes) -> bytes:
    """A field of a message: a number as it is, text and messages with their length before them."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    content = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first.

    >>> _varint(300).hex()
    'ac02'
    """
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])
