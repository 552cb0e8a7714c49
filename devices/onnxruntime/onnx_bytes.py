"""ONNX models byte by byte (protocol buffers, onnx.proto): what runs bundles has no `onnx` package.

Owns: writing small graphs, and taking a message apart into its fields. Does not own: what a graph computes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_IR_VERSION, _OPSET = 10, 18
_INTEGER_ATTRIBUTE, _INTEGERS_ATTRIBUTE = 2, 7
_NUMBER_BITS = 64
_ALL_BITS = 2**_NUMBER_BITS - 1
_OF_NODE = {"input": 1, "output": 2, "name": 3, "operator": 4}
_ATTRIBUTE, _INTEGER, _GRAPH = 5, 3, 7
_VARINT, _LENGTH = 0, 2
"""How a number, and how anything with a length before it, is written."""
ONNX_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}

Port = tuple[str, int, int | Sequence[int]]
"""Name, type of the elements, number of dimensions or their sizes."""


class NotRewritableError(Exception):
    """A stage is whole, and the one that is wanted cannot be made of it."""


class Field(NamedTuple):
    """A field of a message: its number, and a whole number or the bytes within."""

    number: int
    content: int | bytes

    @property
    def data(self) -> bytes:
        """The bytes of a text or a message."""
        if isinstance(self.content, int):
            raise ValueError(f"field {self.number} of a message is a number")
        return self.content

    @property
    def text(self) -> str:
        """A text."""
        return self.data.decode()


def fields(message: bytes) -> list[Field]:
    """Take a message apart; messages within stay bytes.

    Raises:
        ValueError: it has a field of another kind than numbers, texts and messages, or ends in the middle of one.

    >>> fields(field(7, "graph") + field(1, 300))
    [Field(number=7, content=b'graph'), Field(number=1, content=300)]
    """
    found, at = [], 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind not in (_VARINT, _LENGTH):
            raise ValueError(f"field {key >> 3} of a message is of kind {kind}")
        value, at = _read_varint(message, at)
        if kind == _VARINT:
            found.append(Field(key >> 3, value))
            continue
        if at + value > len(message):
            raise ValueError(f"field {key >> 3} of a message ends behind it")
        found.append(Field(key >> 3, message[at : at + value]))
        at += value
    return found


def joined(parts: Sequence[Field]) -> bytes:
    """The message of these fields, in order."""
    return b"".join(field(*part) for part in parts)


def with_graph(model: bytes, rewrite: Callable[[bytes], bytes | None]) -> bytes | None:
    """A model whose graph is rewritten; None where that changes nothing.

    Raises:
        ValueError: these are not the bytes of a model.
    """
    parts = fields(model)
    graphs = [rewrite(part.data) if part.number == _GRAPH else None for part in parts]
    if not any(graphs):
        return None
    return joined([part if made is None else Field(_GRAPH, made) for part, made in zip(parts, graphs, strict=True)])


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(message) and shift < _NUMBER_BITS:
        byte = message[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"a number of a message has no end at byte {at}")


def _within(message: bytes, *path: int) -> list[Field]:
    """The fields at a path of numbers through messages within messages."""
    found = fields(message)
    for number in path:
        found = [inner for part in found if part.number == number for inner in fields(part.data)]
    return found


def sizes_of(port: bytes) -> list[int]:
    """The dimensions of an input or output; 0 for those that are not fixed.

    >>> sizes_of(port("rows", "float32", (1, 8, 64))), sizes_of(port("ids", "int64", 1))
    ([1, 8, 64], [0])
    """
    dimensions = [part for part in _within(port, 2, 1, 2) if part.number == 1]
    values = [[part.content for part in fields(one.data) if part.number == 1] for one in dimensions]
    return [next((value for value in found if isinstance(value, int)), 0) for found in values]


def element_type(port: bytes) -> int:
    """The type of an input's or output's numbers, as in `ONNX_TYPES`; 0 where it is not said."""
    return next((int(part.content) for part in _within(port, 2, 1) if part.number == 1), 0)


class Node:
    """A node: its fields, and what can be read off them."""

    def __init__(self, message: bytes) -> None:
        self.parts = fields(message)
        self.inputs, self.outputs = self._texts("input"), self._texts("output")
        self.name, self.operator = "".join(self._texts("name")), "".join(self._texts("operator"))

    def _texts(self, kind: str) -> list[str]:
        return [part.text for part in self.parts if part.number == _OF_NODE[kind]]

    @property
    def attributes(self) -> dict[str, Field]:
        """By name, which stands first in each."""
        found = [part for part in self.parts if part.number == _ATTRIBUTE]
        return {part.data[2 : 2 + part.data[1]].decode(): part for part in found}

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a whole number."""
        if name not in self.attributes:
            return default
        values = [part.content for part in fields(self.attributes[name].data) if part.number == _INTEGER]
        return next((value for value in values if isinstance(value, int)), default)

    def between(self, inputs: Sequence[str], outputs: Sequence[str], name: str) -> bytes:
        """The same operator between other values."""
        own = [Field(1, value.encode()) for value in inputs] + [Field(2, value.encode()) for value in outputs]
        rest = [part for part in self.parts if part.number not in (1, 2, 3)]
        return joined([*own, Field(3, name.encode()), *rest])


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: int | Sequence[int]
) -> bytes:
    """One operator, with attributes that are integers, or several."""
    names = b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs)
    settings = b"".join(field(5, _attribute(name, value)) for name, value in attributes.items())
    return names + field(4, operator) + settings + (field(7, domain) if domain else b"")


def _attribute(name: str, value: int | Sequence[int]) -> bytes:
    if isinstance(value, int):
        return field(1, name) + field(3, value & _ALL_BITS) + field(20, _INTEGER_ATTRIBUTE)
    return field(1, name) + b"".join(field(8, one) for one in value) + field(20, _INTEGERS_ATTRIBUTE)


def model(
    nodes: Sequence[bytes],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    constants: Mapping[str, NDArray[np.int64] | NDArray[np.int8]] | None = None,
) -> bytes:
    """A model of these nodes, in order."""
    graph = b"".join(field(1, one) for one in nodes) + field(2, "small")
    graph += b"".join(field(5, tensor(name, values)) for name, values in (constants or {}).items())
    graph += b"".join(field(11, port(*one)) for one in inputs)
    graph += b"".join(field(12, port(*one)) for one in outputs)
    return field(1, _IR_VERSION) + field(7, graph) + field(8, field(1, "") + field(2, _OPSET))


def port(name: str, kind: int | str, sizes: int | Sequence[int]) -> bytes:
    """An input or output: its numbers' type, and how many dimensions it has, or how large they are."""
    kind = ONNX_TYPES[kind] if isinstance(kind, str) else kind
    names = [f"{name}{number}" for number in range(sizes)] if isinstance(sizes, int) else []
    found = [field(2, one) for one in names] or [field(1, one) for one in (sizes if not isinstance(sizes, int) else ())]
    dimensions = b"".join(field(1, one) for one in found)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, dimensions)))


def tensor(name: str, values: NDArray[np.int64] | NDArray[np.int8] | NDArray[np.float32]) -> bytes:
    """A constant."""
    sizes = b"".join(field(1, size) for size in values.shape)
    little = values.astype(values.dtype.newbyteorder("<"))
    return sizes + field(2, ONNX_TYPES[str(values.dtype)]) + field(8, name) + field(9, little.tobytes())


def field(number: int, content: int | str | bytes) -> bytes:
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
