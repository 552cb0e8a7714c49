"""Layers that are alike are traced once: a stage's graph has a node in each one's place until that trace is stamped in.

Owns: what makes two layers alike, and putting a layer's graph in a node's place. Does not own: tracing
(`torch_to_onnx.py`), layers and their nodes (`stages/`).
"""

import hashlib
import io
import pickle
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

from mirrorsd.export.stages.layer import DOMAIN, NAME, Layer


def calls_of(graph: ir.Graph) -> list[tuple[ir.Node, str]]:
    """The nodes that stand in layers' places, and whose they are."""
    return [(node, node.attributes[NAME].as_string()) for node in graph if node.domain == DOMAIN]


def stamp(call: ir.Node, layer: Layer, traced: ir.Model) -> None:
    """Put a copy of a traced layer's graph in a node's place, with this layer's weights; `traced` stays as it is."""
    stage = call.graph
    assert isinstance(stage, ir.Graph)
    graph = traced.clone().graph
    own = {value for node in graph for value in node.outputs} | set(graph.initializers.values())
    _rename_sizes(own, _sizes(graph.inputs, call.inputs))
    numbers = dict(layer.module.named_parameters(remove_duplicate=False))
    for value, given in zip(graph.inputs, call.inputs, strict=True):
        assert given is not None
        value.replace_all_uses_with(given)
    for weight in list(graph.initializers.values()):
        assert weight.name is not None
        del graph.initializers[weight.name]
        _take(stage, weight, layer.name + weight.name, numbers.get(weight.name))
    found, nodes = list(graph.outputs), list(graph)
    graph.outputs.clear()
    graph.remove(nodes)
    stage.insert_before(call, nodes)
    for node in nodes:
        node.name = f"{layer.name}{node.name}"
        for value in node.outputs:
            value.name = f"{layer.name}{value.name}"
    for old, new in zip(call.outputs, found, strict=True):
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
    stage.remove(call, safe=True)


def _take(stage: ir.Graph, value: ir.Value, name: str, numbers: Tensor | None) -> None:
    """Have the stage own a layer's weight; one that it has already is used again."""
    if name in stage.initializers:
        if stage.initializers[name].uses() or stage.initializers[name] is value:
            value.replace_all_uses_with(stage.initializers[name])
            return
        del stage.initializers[name]
    value.name = name
    if numbers is not None:
        value.const_value = TorchTensor(numbers.detach(), name=name)
    stage.register_initializer(value)


def _sizes(inputs: Iterable[ir.Value], given: Iterable[ir.Value | None]) -> dict[str | None, Any]:
    """What a layer's symbolic sizes are called in the stage."""
    found: dict[str | None, Any] = {}
    for value, outer in zip(inputs, given, strict=True):
        if value.shape is not None and outer is not None and outer.shape is not None:
            pairs = zip(value.shape, outer.shape, strict=True)
            found |= {inside.value: outside for inside, outside in pairs if isinstance(inside, ir.SymbolicDim)}
    return found


def _rename_sizes(values: Iterable[ir.Value], sizes: Mapping[str | None, Any]) -> None:
    """Sizes that are computed of several others have no name in the stage: they are left open."""
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape(
                [sizes.get(dim.value) if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape]
            )


def likeness(layer: Layer) -> str | None:
    """A digest of all that a layer's graph depends on; None where something of it cannot be written down.

    Of its parameters the numbers do not count, of other tensors they do.
    """
    return digest_of(layer.module, layer.contract, without_numbers=layer.module.parameters())


def digest_of(*things: object, without_numbers: Iterable[Tensor]) -> str | None:
    """A digest of all that things consist of; None where something in them cannot be written down."""
    stream = io.BytesIO()
    try:
        Description(stream, without_numbers).dump(things)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError):
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


class Description(pickle.Pickler):
    """Writes what a graph depends on: tensors as what they look like and what is in their memory, layers as nodes."""

    def __init__(self, stream: io.BytesIO, without_numbers: Iterable[Tensor]) -> None:
        super().__init__(stream)
        self._without_numbers = {id(tensor) for tensor in without_numbers}
        self._memory: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        """How a thing is written: a module without its number among the layers, which only caches know it by."""
        if isinstance(thing, nn.Module):
            hooks = {name: [*part.values()] for name, part in vars(thing).items() if name.endswith("_hooks")}
            own = {name: part for name, part in vars(thing).items() if name != "layer_idx"}
            return str, (str(type(thing)),), own | hooks
        if isinstance(thing, FunctionType) and "<locals>" in thing.__qualname__:  # transformers' own hooks, say
            closed_over = tuple(cell.cell_contents for cell in thing.__closure__ or ())
            return str, (thing.__qualname__,), (thing.__code__.co_code, thing.__code__.co_consts, closed_over)
        if isinstance(thing, Layer):  # a node in the graph of its stage
            return str, ("Layer",), (thing.contract, thing.name)
        if not isinstance(thing, Tensor):
            return NotImplemented
        held = thing.detach().untyped_storage()
        place = self._memory.setdefault(held._cdata, len(self._memory))
        numbers = "" if id(thing) in self._without_numbers else hashlib.sha256(bytes(held)).hexdigest()
        looks = f"{type(thing)} {thing.dtype} {thing.device} {thing.shape} {thing.stride()} {thing.storage_offset()}"
        return str, (f"{looks} {place} {numbers}",)
