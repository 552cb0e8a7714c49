"""The two edits that every graph pass makes: adding a constant tensor, and putting a new value in an old one's place.

Owns: keeping names, types and graph outputs right while doing so. Does not own: any pass.
"""

from typing import Any

import numpy.typing as npt
import onnx_ir as ir


def add_constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Add `array` to the graph's initializers under `name`, or return the one already there."""
    return add_tensor(graph, name, ir.tensor(array, name=name))


def add_tensor(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add `tensor`, which may be lazy, to the graph's initializers under `name`, or return the one already there."""
    if name not in graph.initializers:
        element = ir.TensorType(tensor.dtype)
        graph.register_initializer(
            ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=element, const_value=tensor)
        )
    return graph.initializers[name]


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Put `new` in the place of `old`: its users, its name, its type; a graph output stays one."""
    new.type, new.shape, name = old.type, old.shape, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = None, name
