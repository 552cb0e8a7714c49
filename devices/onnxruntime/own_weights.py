"""A stage in which every product of integers has weights of its own name, though several may be the same bytes.

Where kernels would cut sums off, ONNX Runtime turns signed weights into unsigned ones as it opens a stage
(`names.EXACT_INTEGERS`). It names what it makes after the weight, and so refuses (1.31) a weight that two products
read: a head's LM head, once for each guess.

Owns: the rewriting. Does not own: when a stage is opened so.
"""

from collections import Counter

from mirrorsd.devices.onnxruntime.onnx_bytes import Field, Node, fields, joined, with_graph

_NODE, _INITIALIZER, _NAME_OF_TENSOR = 1, 5, 8
_SIGNED = {"QGemm": (3, 5), "MatMulIntegerToFloat": (1, 5)}
"""Places of weights and their zero points among a product's inputs."""


def with_own_weights(model: bytes) -> bytes | None:
    """The stage with as many names for a weight as products read it; None where none is read twice.

    Raises:
        ValueError: these are not the bytes of a graph.
    """
    return with_graph(model, _separated)


def _separated(graph: bytes) -> bytes | None:
    parts, number_of, copies = fields(graph), Counter[str](), dict[str, str]()
    rest = list[Field]()
    for part in parts:
        node = Node(part.data) if part.number == _NODE else None
        if node is None or node.operator not in _SIGNED:
            rest.append(part)
            continue
        inputs = list(node.inputs)
        for place in _SIGNED[node.operator]:
            if place < len(inputs) and (name := inputs[place]):
                number_of[name] += 1
                if number_of[name] > 1:
                    inputs[place] = f"{name}.{number_of[name]}"
                    copies[inputs[place]] = name
        rest.append(Field(_NODE, node.between(inputs, node.outputs, node.name)))
    if not copies:
        return None
    tensors = {_name_of(part): fields(part.data) for part in parts if part.number == _INITIALIZER}
    return joined([*rest, *(Field(_INITIALIZER, _named(tensors[name], copy)) for copy, name in copies.items())])


def _name_of(tensor: Field) -> str:
    return next(part.text for part in fields(tensor.data) if part.number == _NAME_OF_TENSOR)


def _named(tensor: list[Field], name: str) -> bytes:
    return joined([*(part for part in tensor if part.number != _NAME_OF_TENSOR), Field(_NAME_OF_TENSOR, name.encode())])
