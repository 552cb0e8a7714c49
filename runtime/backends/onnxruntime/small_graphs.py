"""Small models written byte by byte (protocol buffers, onnx.proto): what runs bundles has no `onnx` package.

Owns: the format. Does not own: which graphs there are (`device_memory`, `best_logits`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_IR_VERSION, _OPSET = 10, 18
_INTEGER_ATTRIBUTE = 2
ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}

Port = tuple[str, int, int]
"""Name, type of the elements, number of dimensions."""


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> bytes:
    """One operator, with attributes that are integers."""
    names = b"".join(_field(1, name) for name in inputs) + b"".join(_field(2, name) for name in outputs)
    settings = b"".join(
        _field(5, _field(1, name) + _field(3, value) + _field(20, _INTEGER_ATTRIBUTE))
        for name, value in attributes.items()
    )
    return names + _field(4, operator) + settings


def model(
    nodes: Sequence[bytes],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    constants: Mapping[str, NDArray[np.int64]] | None = None,
) -> bytes:
    """A model of these nodes, in order."""
    graph = b"".join(_field(1, one) for one in nodes) + _field(2, "small")
    graph += b"".join(_field(5, _tensor(name, values)) for name, values in (constants or {}).items())
    graph += b"".join(_field(11, _port(*port)) for port in inputs)
    graph += b"".join(_field(12, _port(*port)) for port in outputs)
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(1, "") + _field(2, _OPSET))


def _port(name: str, kind: int, rank: int) -> bytes:
    dimensions = b"".join(_field(1, _field(2, f"{name}{number}")) for number in range(rank))
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, dimensions)))


def _tensor(name: str, values: NDArray[np.int64]) -> bytes:
    sizes = b"".join(_field(1, size) for size in values.shape)
    return sizes + _field(2, ONNX_TYPES["int64"]) + _field(8, name) + _field(9, values.astype("<i8").tobytes())


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
