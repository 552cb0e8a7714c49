"""A draft for ONNX Runtime on a processor: its weights in blocks of four bits, or products of integers by row.

Owns: which weights get which form, what OpenVINO would have done for itself when it compiles, and the files. Does not
own: the packing (`passes/quantise`).
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from mirrorsd.export.passes.graph_edits import add_constant, add_tensor, take_over
from mirrorsd.export.passes.graph_passes import FuseSkipNorm
from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.rotary import FuseRotary
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.export.weights.lazy_weight import HASHED, LazyWeight, first_name, lazy_weight
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.manifest import IN_BLOCKS

_EMBEDDING = BlockChoice(bits=8, largest=64)
"""The rows of few tokens are looked up: their bits cost no time."""


def formats_of(precision: str, block_size: int, floats: frozenset[str]) -> WeightFormats:
    """How the weights of a draft for a processor are stored; `floats` names those that stay as they are."""
    if precision == IN_BLOCKS:
        blocks = BlockChoice(bits=4, block_size=block_size)
        return WeightFormats(layers=blocks, head=blocks, embedding=_EMBEDDING, floats=floats)
    by_row = BlockChoice(bits=8, is_by_row=True)
    return WeightFormats(layers=by_row, head=by_row, embedding=by_row, floats=floats)


def write_draft_for_processors(model: ir.Model, shape: DraftShape, path: Path, precision: str, block_size: int) -> None:
    """Write the exported draft (which is used up) to `path`, and the weights to the `.bin` beside it.

    Args:
        model: The draft as ONNX, with weights in floats.
        shape: Of its passes.
        path: Where to write; the folder exists.
        precision: `IN_BLOCKS` or `IN_ROWS`.
        block_size: Weights that share a scale, in blocks.
    """
    _cut_head(model.graph, shape.vocab_size)
    _sum_by_softmax(model.graph, shape.vocab_size)
    floats = _of_streams(model.graph, shape.vocab_size)
    for graph_pass in (
        FuseRotary(),
        FuseSkipNorm(),
        common.RemoveUnusedNodesPass(),
        QuantiseWeights(formats_of(precision, block_size, floats), shape.vocab_size),
        common.RemoveUnusedNodesPass(),
    ):
        graph_pass(model)
    ir.save(model, path, external_data=path.with_suffix(".bin").name)


def _cut_head(graph: ir.Graph, vocab_size: int) -> None:
    """Have the head multiply with a weight of its own, and links look tokens up there.

    The draft's stage cuts the embedding, or a head with more tokens, and turns it; where nothing is cut, the exporter
    has turned it already.
    """
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        turned = None if weight is None else weight.producer()
        if weight is not None and weight.const_value is not None and _is_of_tips(node, vocab_size):
            own = _turned_table(graph, weight, vocab_size)
            _multiply_rows(graph, node, add_tensor(graph, own.key, own))
        elif turned is not None and turned.op_type == "Transpose" and turned.inputs[0] is not None:
            table = _table_of(turned.inputs[0], vocab_size)
            if table is not None:
                _multiply_rows(graph, node, add_tensor(graph, table.key, table))
        elif node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[0].producer() is not None:
            table = _table_of(node.inputs[0], vocab_size)
            if table is not None:
                node.replace_input_with(0, add_tensor(graph, table.key, table))


def _is_of_tips(product: ir.Node, vocab_size: int) -> bool:
    """Whether it gives every row of each tip `[R, 1+s, V]` a number a token; a layer's may be as wide, `[1, N, V]`."""
    shape = product.outputs[0].shape
    return shape is not None and len(shape) == 3 and isinstance(shape[1], int) and shape[2] == vocab_size


def _turned_table(graph: ir.Graph, turned: ir.Value, vocab_size: int) -> LazyWeight:
    """The table that a head `[H, V]` was turned from: the embedding, where that has the same numbers."""
    assert turned.const_value is not None  # the caller has looked
    rows = turned.const_value.numpy().T
    for value in graph.initializers.values():
        known = value.const_value
        sizes = () if known is None else known.shape.numpy()
        if len(sizes) == 2 and sizes[1] == rows.shape[1] and sizes[0] >= vocab_size:
            table = _table_of(value, vocab_size)
            if table is not None and np.array_equal(table.numpy(), rows):
                return table
    return lazy_weight(turned.const_value).transposed()


def _of_streams(graph: ir.Graph, vocab_size: int) -> frozenset[str]:
    """Names of the streams' adapters and links: no stored tensors as they are.

    They are small: rounding what they multiply would take as long as is gained.
    """
    found = set[str]()
    for node in graph:
        weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
            continue
        if vocab_size in weight.const_value.shape.numpy():  # the head
            continue
        named = lazy_weight(weight.const_value)
        if named.key.startswith(HASHED):
            weight.const_value = named
            found.add(first_name(named.key))
    return frozenset(found)


def _table_of(value: ir.Value, vocab_size: int) -> LazyWeight | None:
    """The first `vocab_size` rows of the constant that `value` is, or is cut from; None for anything else."""
    cut = value.producer()
    if cut is not None and cut.op_type in ("Slice", "Identity") and cut.inputs[0] is not None:
        value = cut.inputs[0]
    if value.const_value is None or len(value.const_value.shape) != 2:
        return None
    return lazy_weight(value.const_value).first_rows(vocab_size)


def _multiply_rows(graph: ir.Graph, product: ir.Node, table: ir.Value) -> None:
    """Write a product of rows `[R, 1+s, H]` with a turned table as one of `[R*(1+s), H]` with the table `[V, H]`."""
    rows, found = product.inputs[0], product.outputs[0]
    assert rows is not None and found.shape is not None and table.shape is not None  # an exported graph has shapes
    num_tokens, width = (int(size) for size in table.shape.numpy())
    flat = add_constant(graph, "head.flat", np.array([-1, width], np.int64))
    of_tips = add_constant(graph, "head.of_tips", np.array([-1, int(found.shape[1]), num_tokens], np.int64))  # type: ignore[arg-type]
    as_rows = ir.Node("", "Reshape", [rows, flat], name=f"{product.name}_rows")
    multiplied = ir.Node(
        "", "Gemm", [as_rows.outputs[0], table], [ir.AttrInt64("transB", 1)], name=f"{product.name}_flat"
    )
    whole = ir.Node("", "Reshape", [multiplied.outputs[0], of_tips], name=f"{product.name}_tips")
    graph.insert_before(product, [as_rows, multiplied, whole])
    for made in (as_rows, multiplied):
        made.outputs[0].name, made.outputs[0].type = made.name, rows.type
    take_over(found, whole.outputs[0])
    graph.remove(product, safe=True)


def _sum_by_softmax(graph: ir.Graph, vocab_size: int) -> None:
    """Write the sums over all tokens by `LogSoftmax`, which has a fast kernel: `x - log_softmax(x)` is the sum's log.

    Of 16 rows of 16,384 tokens ONNX Runtime's ReduceLogSumExp takes 2.2 ms, a third of the round.
    """
    last = [ir.AttrInt64("axis", -1)]
    first, second, axis = (
        add_constant(graph, f"first_token.{name}", np.array([value], np.int64))
        for name, value in (("start", 0), ("end", 1), ("axis", -1))
    )
    for node in list(graph):
        if node.op_type != "ReduceLogSumExp":
            continue
        logits = node.inputs[0]
        if logits is None or logits.shape is None or logits.shape[-1] != vocab_size:
            continue
        shares = ir.Node("", "LogSoftmax", [logits], last, name=f"{node.name}_shares")
        bare = ir.Node("", "Slice", [logits, first, second, axis], name=f"{node.name}_bare")
        share = ir.Node("", "Slice", [shares.outputs[0], first, second, axis], name=f"{node.name}_share")
        mass = ir.Node("", "Sub", [bare.outputs[0], share.outputs[0]], name=f"{node.name}_mass")
        graph.insert_before(node, [shares, bare, share, mass])
        for made in (shares, bare, share):
            made.outputs[0].name, made.outputs[0].type = made.name, logits.type
        take_over(node.outputs[0], mass.outputs[0])
        graph.remove(node, safe=True)
