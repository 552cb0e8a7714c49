"""From a stage as PyTorch module to an `onnx_ir` model with the contract's names and shapes.

Owns: the one call of `torch.onnx.export`, and putting lazy weights into its result. Does not own: the stages, the
graph passes, files.
"""

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnxscript import optimizer
from torch import Tensor, nn

from mirrorsd.export.passes.graph_edits import add_tensor
from mirrorsd.export.passes.stamping import calls_of, count_rows_by_hidden, likeness, open_weights, stamp
from mirrorsd.export.stages.layer import DOMAIN, Layer
from mirrorsd.export.weights.lazy_weight import LazyWeight, lazy_weight
from mirrorsd.graphs.contract import Dim, StageContract, TensorSpec
from mirrorsd.graphs.errors import ExportError

OPSET = 23
_EXPORTER_LOGGER = "torch.onnx._internal.exporter._registration"
_ATEN = torch.ops.aten
_Form = tuple[Any, tuple[Any, ...], dict[str, Any]]
_NOTES = (_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default)
"""Of what was seen while a graph was traced: the exporter leaves them out."""
_EXAMPLE_SIZES = {"S": 3, "C": 24, "R": 2, "N": 7}


@dataclass(frozen=True, slots=True)
class Weights:
    """What becomes of a model's parameters in its graphs, and the layers that were traced for these.

    `of` names, of a module, those parameters that need no numbers.
    """

    of: Callable[[nn.Module], Mapping[str, LazyWeight]] = lambda module: {}
    traced: dict[str, ir.Model] = field(default_factory=dict)


def export_stage(module: nn.Module, contract: StageContract, weights: Weights) -> ir.Model:
    """Export `module`, whose inputs and outputs are those of `contract`, in its order.

    Symbolic dimensions of the contract stay symbolic.

    Args:
        module: The stage; its `layers`, if it has any, are traced by themselves, those that are alike once.
        contract: Its inputs and outputs.
        weights: What becomes of its parameters in the graph.

    Raises:
        ExportError: PyTorch cannot export this model.
    """
    program = trace(module.eval(), contract)
    _put_in(weights.of(module), program.model.graph)
    _optimize(program)
    model = program.model
    layers: dict[str, Layer] = {layer.name: layer for layer in getattr(module, "layers", ())}
    for call, name in calls_of(model.graph):
        layer, traced = layers[name], _traced(layers[name], weights.traced)
        stamp(call, layer, traced, weights.of(layer.module))
        model.opset_imports.update(traced.opset_imports)
    if layers:
        model.opset_imports.pop(DOMAIN, None)
        optimizer.fold_constants(model)  # what is made of small weights alone
        common.CommonSubexpressionEliminationPass()(model)  # what several layers make of the same inputs
    model.graph.name = contract.name
    values, specs = (*model.graph.inputs, *model.graph.outputs), (*contract.inputs, *contract.outputs)
    for value, spec in zip(values, specs, strict=True):
        value.name = spec.name
        value.shape = ir.Shape(spec.shape)
    for value in (*values, *model.graph.initializers.values()):
        value.metadata_props.clear()
    return model


def _traced(layer: Layer, traced: dict[str, ir.Model]) -> ir.Model:
    """The graph of a layer, from one that is like it if there was one."""
    layer.module.eval()
    key = likeness(layer)
    if key in traced:
        return traced[key]
    program = trace(layer.module, layer.contract)
    count_rows_by_hidden(program.model.graph)
    open_weights(program.model.graph, layer.module)
    _optimize(program)
    found = program.model
    found.graph.name = layer.name if key is None else f"kinds.{len(traced)}"
    if key is not None:
        traced[key] = found
    return found


def trace(module: nn.Module, contract: StageContract) -> torch.onnx.ONNXProgram:
    """The graph as the exporter makes it, with the module's own weights: most of an export's time, for small models.

    Raises:
        ExportError: PyTorch cannot export this model.
    """
    try:
        with _silenced(), _nothing_twice(), torch.no_grad():
            program = torch.onnx.export(
                module,
                tuple(_example(spec) for spec in contract.inputs),
                dynamic_shapes=(_dynamic_axes(contract),),
                input_names=[spec.name for spec in contract.inputs],
                output_names=[spec.name for spec in contract.outputs],
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                optimize=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"PyTorch cannot export stage {contract.name!r} of this model: {error}") from error
    assert program is not None  # None only where a file is written
    return program


def _optimize(program: torch.onnx.ONNXProgram) -> None:
    with _nothing_twice():
        program.optimize()


def _put_in(weights: Mapping[str, LazyWeight], graph: ir.Graph) -> None:
    """Give the initializers their lazy weights, transposed already where the graph would transpose them.

    The exporter's own folding of constants would do the same, but by computing every one of them, and only where one
    node reads them: a head's matrices are read for every guess.
    """
    for name, weight in weights.items():
        if name in graph.initializers:
            graph.initializers[name].const_value = weight
    for node in list(graph):
        constant = node.inputs[0].const_value if node.op_type == "Transpose" and node.inputs[0] is not None else None
        if constant is None or list(node.attributes["perm"].as_ints()) != [1, 0]:
            continue
        source = lazy_weight(constant).transposed()
        turned = add_tensor(graph, source.key, source)
        node.outputs[0].replace_all_uses_with(turned)
        graph.remove(node, safe=True)


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The number that stands for a size in an example: "C+2*N" is a sum of products.

    >>> _size("C+2*N", {"C": 24, "N": 7})
    38
    """
    if isinstance(dim, int):
        return dim
    products = ([int(word) if word.isdigit() else sizes[word] for word in term.split("*")] for term in dim.split("+"))
    return sum(math.prod(product) for product in products)


def _example(spec: TensorSpec) -> Tensor:
    shape = tuple(_size(dim, _EXAMPLE_SIZES) for dim in spec.shape)
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


def _dynamic_axes(contract: StageContract) -> tuple[dict[int, object], ...]:
    """Each symbolic dimension is named where it first appears; the exporter finds the others out (`C+N` too)."""
    named: set[str] = set()
    axes: list[dict[int, object]] = []
    for spec in contract.inputs:
        axes.append({})
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                is_new_name = dim not in named and dim.isidentifier()
                axes[-1][axis] = dim if is_new_name else torch.export.Dim.DYNAMIC
                named.add(dim)
    return tuple(axes)


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop the exporter's own notes: torch's use of a name that torch has renamed, and operators of torchvision."""
    logger = logging.getLogger(_EXPORTER_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)


_Part = tuple[Any, str, Any]
"""Whose it is, what it is called there, and what takes its place."""


@contextmanager
def _nothing_twice() -> Iterator[None]:
    """Have the exporter and its optimizer compute once what they compute over and over.

    Where another version has such a part elsewhere, it stays as it is.
    """
    with ExitStack() as stack:
        for find in _PARTS:
            with suppress(ImportError, AttributeError, KeyError):
                owner, name, ours = find()
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, ours)
        yield


def _operators_at_hand() -> _Part:
    """Operators come from memory: the exporter reads all their sources for every graph."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry as owner  # noqa: N813

    known = _known_operators(owner)

    def copied(*_: object, **__: object) -> Any:
        registry = copy.copy(known)
        registry.functions = {name: list(forms) for name, forms in known.functions.items()}
        return registry

    return owner, "from_torchlib", copied


@functools.cache
def _known_operators(owner: Any) -> Any:
    return owner.from_torchlib(opset_version=OPSET)


def _decomposed_in_place() -> _Part:
    """No graph is traced again, to decompose it, whose operators all have a form in ONNX already."""
    from torch.onnx._internal.exporter import _fx_passes as owner

    usual = owner.decompose_with_registry

    def decomposed(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        return program if _decompose(program.graph, registry.is_registered) else usual(program, registry)

    return owner, "decompose_with_registry", decomposed


def _types_of_the_trace() -> _Part:
    """The types of values are known from the trace: the exporter runs the graph again to see which are promoted."""
    from torch.onnx._internal.fx.passes import type_promotion

    owner = type_promotion._TypePromotionInterpreter
    usual, rule_of = owner.run_node, type_promotion.get_type_promotion_rule

    def looked_up(self: Any, node: torch.fx.Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return usual(self, node)
        if rule := rule_of(node, self.type_promotion_table):
            with self._set_current_node(node):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    return owner, "run_node", looked_up


def _no_places_in_sources() -> _Part:
    """No line of source is looked up for each node of a trace: nothing reads them."""
    return torch.fx.config, "do_not_emit_stack_traces", True


def _patterns_by_operator() -> _Part:
    """A pattern is tried where its last operator is: the optimizer tries each at all nodes, at great length."""
    from onnxscript.rewriter import RewriteRule as owner  # noqa: N813

    usual = owner.try_rewrite

    def tried(rule: Any, model: ir.Model, graph: ir.Graph, node: ir.Node, **settings: Any) -> Any:
        ends = rule._target_pattern.output_nodes[0].op
        return usual(rule, model, graph, node, **settings) if ends.matches(node.op_type) else None

    return owner, "try_rewrite", tried


_PARTS = (
    *(_operators_at_hand, _decomposed_in_place, _types_of_the_trace),
    *(_no_places_in_sources, _patterns_by_operator),
)


def _cast(call: torch.fx.Node) -> _Form:
    rows, dtype = call.args[:2]
    if rows.meta["val"].dtype == dtype:  # type: ignore[union-attr]
        return _ATEN.clone.default, (rows,), {}
    return _ATEN._to_copy.default, (rows,), {"dtype": dtype}


_FORMS: Mapping[Any, Callable[[torch.fx.Node], _Form]] = {
    _ATEN.to.dtype: _cast,
    _ATEN.detach_.default: lambda call: (_ATEN.clone.default, call.args, {}),
    _ATEN.square.default: lambda call: (_ATEN.pow.Tensor_Scalar, (*call.args, 2), {}),
    _ATEN.__and__.Tensor: lambda call: (_ATEN.bitwise_and.Tensor, call.args, {}),
    _ATEN.rsub.Scalar: lambda call: (
        _ATEN.sub.Tensor,
        call.args[1::-1],
        {"alpha": call.args[2] if call.args[2:] else 1},
    ),
}
"""What PyTorch decomposes into one operator: this, its inputs and its attributes."""


def _decompose(graph: torch.fx.Graph, is_known: Callable[[Any], bool]) -> bool:
    """Give each operator that is not known its form in known ones; False, and nothing is changed, if one has none."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target not in _NOTES]
    for call in calls:
        is_changing = isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable
        if call.target not in _FORMS and (is_changing or not is_known(call.target)):
            return False
    for call in calls:
        if call.target in _FORMS:
            call.target, call.args, call.kwargs = _FORMS[call.target](call)
    return True
