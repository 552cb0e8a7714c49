"""The chain of passes from an exported stage to the graph that ships, and the small passes of it.

Owns: norm fusion, reshape clean-up, the order of all passes. Does not own: rotary (`rotary.py`),
joint projections (`projection.py`), weights on disk.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import onnx_ir as ir
import onnx_ir.passes.common as common

from mirrorsd.export.passes.experts import SpreadExperts
from mirrorsd.export.passes.graph_edits import take_over
from mirrorsd.export.passes.projection import JoinProjections
from mirrorsd.export.passes.quantise import ChoosePack, QuantiseWeights, round_to_nearest
from mirrorsd.export.passes.rotary import FoldRotary
from mirrorsd.export.passes.spare_row import AddSpareRows
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.graphs.errors import ExportError


class FuseSkipNorm(ir.passes.InPlacePass):
    """Write `RMSNormalization(a + b)` as `SkipSimplifiedLayerNormalization`, others as `SimplifiedLayerNormalization`.

    Both have fast kernels in ONNX Runtime's CPU, CUDA and DirectML providers.
    Ensures: no `RMSNormalization` is left.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every RMS norm of `model`."""
        norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
        for norm in norms:
            summed = norm.inputs[0]
            add = None if summed is None else summed.producer()
            if add is not None and add.op_type == "Add" and _is_single_norm(add) and _same_shapes(add):
                _fuse_with_add(model.graph, add, norm)
            else:
                _rename(model.graph, norm)
        if norms:
            model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(norms))

    def ensures(self, model: ir.Model) -> None:
        """Check that no RMSNormalization is left."""
        if any(node.op_type == "RMSNormalization" for node in model.graph):
            raise ir.passes.PostconditionError("an RMSNormalization is left")


def _is_single_norm(add: ir.Node) -> bool:
    """Say whether this sum feeds exactly one norm; parallel branches with two norms keep their sum."""
    return sum(use.node.op_type == "RMSNormalization" for use in add.outputs[0].uses()) == 1


def _same_shapes(add: ir.Node) -> bool:
    return all(operand is not None and operand.shape == add.outputs[0].shape for operand in add.inputs)


def _fuse_with_add(graph: ir.Graph, add: ir.Node, norm: ir.Node) -> None:
    fused = ir.Node(
        "com.microsoft",
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, norm.inputs[1]],
        [ir.AttrFloat32("epsilon", norm.attributes["epsilon"].as_float())],
        num_outputs=4,
        name=f"skip_{norm.name}",
    )
    graph.insert_before(norm, fused)
    fused.outputs[1].name = fused.outputs[2].name = ""
    take_over(norm.outputs[0], fused.outputs[0])
    take_over(add.outputs[0], fused.outputs[3])
    graph.remove([norm, add], safe=True)


def _rename(graph: ir.Graph, norm: ir.Node) -> None:
    renamed = ir.Node(
        "",
        "SimplifiedLayerNormalization",
        norm.inputs[:2],
        [norm.attributes[name] for name in ("axis", "epsilon", "stash_type")],
        name=norm.name,
    )
    graph.insert_before(norm, renamed)
    take_over(norm.outputs[0], renamed.outputs[0])
    graph.remove(norm, safe=True)


class DropIdleReshapes(ir.passes.InPlacePass):
    """Remove reshapes whose result has the shape that a value before them already had."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Bypass every such reshape of `model`."""
        num_dropped = 0
        for node in list(model.graph):
            origin = _same_shape_before(node)
            if origin is None or node.outputs[0].is_graph_output():
                continue
            node.outputs[0].replace_all_uses_with(origin)
            num_dropped += 1
        return ir.passes.PassResult(model, modified=num_dropped > 0)


def _same_shape_before(reshape: ir.Node) -> ir.Value | None:
    """The earliest value in a chain of reshapes that already has the last one's shape."""
    if reshape.op_type != "Reshape":
        return None
    found, node = None, reshape
    while node is not None and node.op_type == "Reshape":
        value = node.inputs[0]
        if value is None:
            break
        if value.shape is not None and value.shape == reshape.outputs[0].shape:
            found = value
        producer = value.producer()
        if producer is None:
            break
        node = producer
    return found


def optimise_draft(model: ir.Model) -> ir.Model:
    """Join the projections of an exported draft, in place; OpenVINO fuses the rest when it compiles."""
    for graph_pass in (JoinProjections(), common.RemoveUnusedNodesPass()):
        graph_pass(model)
    return model


def optimise_head(
    model: ir.Model,
    formats: WeightFormats,
    vocab_size: int,
    choose_pack: ChoosePack = round_to_nearest,
    lent: Mapping[str, BlockChoice | None] = MappingProxyType({}),
) -> ir.Model:
    """Join the projections of an exported head and pack its weights, in place.

    All products are packed like the LM head, but for those of the target's layers, whose formats are in `lent` by name.
    """
    chain: tuple[ir.passes.PassBase, ...] = (
        JoinProjections(WeightFormats(carried=formats.carried)),
        common.ClearMetadataAndDocStringPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        QuantiseWeights(replace(formats, layers=formats.in_blocks.head), vocab_size, choose_pack, lent),
        common.RemoveUnusedNodesPass(),
    )
    return _run(chain, model)


def optimise_stage(
    model: ir.Model,
    formats: WeightFormats,
    vocab_size: int,
    choose_pack: ChoosePack = round_to_nearest,
    *,
    has_spare_rows: bool = False,
) -> ir.Model:
    """Run all passes on an exported target stage, in place.

    Args:
        model: The stage as `torch_to_onnx` gives it.
        formats: What becomes of the weights; the float ones are already what they should be.
        vocab_size: Width of the LM head, by which it is known.
        choose_pack: How each weight is rounded.
        has_spare_rows: Whether attention gets rows of zeros, for the same bits with any number of rows.

    Raises:
        ExportError: the graph has a form that a pass does not support.
    """
    chain: tuple[ir.passes.PassBase, ...] = (
        SpreadExperts(formats),
        FoldRotary(),
        DropIdleReshapes(),
        common.RemoveUnusedNodesPass(),
        FuseSkipNorm(),
        common.RemoveUnusedNodesPass(),
        JoinProjections(formats),
        *([AddSpareRows()] if has_spare_rows else []),
        common.ClearMetadataAndDocStringPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        QuantiseWeights(formats, vocab_size, choose_pack),
        common.RemoveUnusedNodesPass(),
    )
    return _run(chain, model)


def _run(chain: tuple[ir.passes.PassBase, ...], model: ir.Model) -> ir.Model:
    for graph_pass in chain:
        try:
            graph_pass(model)
        except ir.passes.InvariantError as error:
            raise ExportError(f"stage {model.graph.name!r} cannot be optimised: {error}") from error
    return model
