"""Layers that are alike are traced once: a stage's graph has a node in each one's place until that trace is stamped in.

Owns: what makes two layers alike, and putting a layer's graph in a node's place. Does not own: tracing
(`torch_to_onnx.py`), layers and their nodes (`stages/`).
"""

import hashlib
import io
import pickle
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

from mirrorsd.export.passes.graph_edits import add_tensor
from mirrorsd.export.stages.layer import DOMAIN, NAME, Layer
from mirrorsd.export.weights.lazy_weight import TRANSPOSED, LazyWeight, lazy_weight


def calls_of(graph: ir.Graph) -> list[tuple[ir.Node, str]]:
    """The nodes that stand in layers' places, and whose they are."""
    return [(node, node.attributes[NAME].as_string()) for node in graph if node.domain == DOMAIN]


def open_weights(graph: ir.Graph, module: nn.Module) -> None:
    """Make the parameters of a traced layer inputs of its graph, behind its own: nothing is computed of their numbers.

    A matrix that the graph turns is an input already turned, as its weight will be stored.
    """
    for name, _ in module.named_parameters(remove_duplicate=False):
        if (value := graph.initializers.get(name)) is None:
            continue
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
        for node in [use.node for use in value.uses() if use.node.op_type == "Transpose"]:
            if list(node.attributes["perm"].as_ints()) == [1, 0]:
                turned = node.outputs[0]
                given = ir.Value(name=name + TRANSPOSED, shape=turned.shape, type=turned.type)
                graph.inputs.append(given)
                turned.replace_all_uses_with(given)
                graph.remove(node, safe=True)


def count_rows_by_hidden(graph: ir.Graph) -> None:
    """Have a traced layer read the number of rows off its hidden states, the first input, and off no other.

    PyTorch takes any input that has as many. Where that is one of the angles, nothing else may read these in the end:
    attention rotates by tables of its own, and what looks angles up by the text's length goes.
    """
    hidden, *others = graph.inputs
    assert hidden.shape is not None
    rows = hidden.shape[1]
    for node in graph:
        given = node.inputs[0] if node.op_type == "Shape" else None
        if given is None or given.shape is None or given not in others:
            continue
        start, end = (node.attributes.get_int(name, default) for name, default in (("start", 0), ("end", 99)))
        if list(given.shape)[start:end] == [rows]:
            node.replace_input_with(0, hidden)
            node.attributes.update(start=ir.AttrInt64("start", 1), end=ir.AttrInt64("end", 2))


def stamp(call: ir.Node, layer: Layer, traced: ir.Model, weights: Mapping[str, LazyWeight]) -> None:
    """Put a copy of a traced layer's graph in a node's place.

    Args:
        call: The node.
        layer: What it stands for.
        traced: The graph, its weights behind the inputs of the contract; it stays as it is.
        weights: By the names of the layer's parameters; those that are not there have their own numbers.
    """
    stage = call.graph
    assert isinstance(stage, ir.Graph)
    graph = traced.clone().graph
    own = {value for node in graph for value in node.outputs} | set(graph.initializers.values())
    _rename_sizes(own, _sizes(graph.inputs, call.inputs))
    for value, given in zip(graph.inputs, call.inputs, strict=False):
        assert given is not None
        value.replace_all_uses_with(given)
    for value in graph.inputs[len(call.inputs) :]:
        if value.uses():
            value.replace_all_uses_with(_weight(stage, layer, str(value.name), weights))
    for constant in list(graph.initializers.values()):  # equal for layers that are alike
        assert constant.const_value is not None
        kept = add_tensor(stage, f"{graph.name}.{constant.name}", constant.const_value)
        constant.replace_all_uses_with(kept)
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


def _weight(stage: ir.Graph, layer: Layer, name: str, weights: Mapping[str, LazyWeight]) -> ir.Value:
    """What a layer has for an input of its trace that is called like one of its parameters."""
    parameter = name.removesuffix(TRANSPOSED)
    tensor: ir.TensorProtocol
    if parameter in weights:
        tensor = weights[parameter]
    else:
        tensor = TorchTensor(layer.module.get_parameter(parameter).detach(), name=layer.name + parameter)
    if name == parameter:
        return add_tensor(stage, layer.name + name, tensor)
    turned = lazy_weight(tensor).transposed()
    return add_tensor(stage, turned.key, turned)


def _sizes(inputs: Iterable[ir.Value], given: Iterable[ir.Value | None]) -> dict[str | None, Any]:
    """What a layer's symbolic sizes are called in the stage."""
    found: dict[str | None, Any] = {}
    for value, outer in zip(inputs, given, strict=False):
        if value.shape is not None and outer is not None and outer.shape is not None:
            pairs = zip(value.shape, outer.shape, strict=True)
            found = {inside.value: outside for inside, outside in pairs if isinstance(inside, ir.SymbolicDim)} | found
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
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


class Description(pickle.Pickler):
    """Writes what a graph depends on: tensors as what they look like and what is in their memory, layers as nodes."""

    def __init__(self, stream: io.BytesIO, without_numbers: Iterable[Tensor]) -> None:
        super().__init__(stream)
        self.fast = True  # otherwise two equal words are written otherwise where they are one object
        self._without_numbers = {id(tensor) for tensor in without_numbers}
        self._seen: dict[int, tuple[int, object]] = {}
        self._memory: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        """How a thing is written: a module without its number among the layers, which only caches know it by."""
        if isinstance(thing, type | BuiltinFunctionType):
            return NotImplemented
        if id(thing) in self._seen:
            return str, (f"the same as no. {self._seen[id(thing)][0]}",)
        self._seen[id(thing)] = (len(self._seen), thing)
        if isinstance(thing, nn.Module):
            hooks = {name: [*part.values()] for name, part in vars(thing).items() if name.endswith("_hooks")}
            own = {name: part for name, part in vars(thing).items() if name != "layer_idx"}
            return str, (str(type(thing)),), own | hooks
        if isinstance(thing, FunctionType) and "<locals>" in thing.__qualname__:  # transformers' own hooks, say
            code, closed_over = thing.__code__, tuple(cell.cell_contents for cell in thing.__closure__ or ())
            does = code.co_code, code.co_consts, code.co_names, thing.__defaults__, thing.__kwdefaults__, closed_over
            return str, (f"{thing.__module__}.{thing.__qualname__}",), does
        if isinstance(thing, Layer):  # a node in the graph of its stage
            return str, ("Layer",), (thing.contract, thing.name)
        if not isinstance(thing, Tensor):
            return NotImplemented
        held = thing.detach().untyped_storage()
        place = self._memory.setdefault(held._cdata, len(self._memory))
        numbers = "" if id(thing) in self._without_numbers else hashlib.sha256(bytes(held)).hexdigest()
        looks = f"{type(thing)} {thing.dtype} {thing.device} {thing.shape} {thing.stride()} {thing.storage_offset()}"
        return str, (f"{looks} {place} {numbers}",)
