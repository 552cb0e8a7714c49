"""What a file's blocks are offset by, beside the operators of their levels: those know of no offsets that are floats.

Owns: the nodes behind a product or a look-up. Does not own: levels and scales (`quantise.py`), what the offsets are
(`weights/gguf_blocks.py`).
"""

import numpy as np
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant, add_tensor, take_over
from mirrorsd.export.weights.lazy_weight import LazyWeight

__all__ = ["add_to_look_up", "add_to_product"]


def add_to_product(graph: ir.Graph, node: ir.Node, offsets: LazyWeight, block_size: int) -> None:
    """Add the sum of the inputs of each block, times its offset; `offsets` are `[N, B]`.

    ONNX Runtime's sum of no rows at all keeps the axis that it should sum over, so it is given its shape.
    `MatMulNBits` takes zero points that are floats too, but then turns the whole weight into floats in every pass.
    """
    rows = node.inputs[0]
    rank = _rank_of(rows, node)
    num_blocks = int(offsets.shape.numpy()[1])
    by_block = _shape(graph, [0] * (rank - 1) + [num_blocks, block_size])
    turned = offsets.transposed()
    weight = add_tensor(graph, turned.key, turned)
    split = ir.Node("", "Reshape", [rows, by_block], name=f"{node.name}_blocks")
    sums = ir.Node(
        "", "ReduceSum", [split.outputs[0], _last(graph)], [ir.AttrInt64("keepdims", 0)], name=f"{node.name}_sums"
    )
    by_row = _shape(graph, [0] * (rank - 1) + [num_blocks])
    shaped = ir.Node("", "Reshape", [sums.outputs[0], by_row], name=f"{node.name}_block_sums")
    added = ir.Node("", "MatMul", [shaped.outputs[0], weight], name=f"{node.name}_offsets")
    whole = ir.Node("", "Add", [added.outputs[0], added.outputs[0]], name=f"{node.name}_with_offsets")
    graph.insert_after(node, [split, sums, shaped, added, whole])
    _put_behind(node, whole.outputs[0])
    whole.replace_input_with(0, node.outputs[0])


def add_to_look_up(graph: ir.Graph, node: ir.Node, offsets: LazyWeight, block_size: int) -> None:
    """Add to each weight of the rows that are looked up its block's offset; `offsets` are `[N, B]`.

    A row of levels less zero points times scales, such as 0.5, -1.5 in a block with the offset 0.25, becomes 0.75,
    -1.25: the numbers that the file stands for, to the bit.
    """
    rank = _rank_of(node.outputs[0], node)
    num_blocks = int(offsets.shape.numpy()[1])
    table = add_tensor(graph, offsets.key, offsets)
    looked_up = ir.Node("", "Gather", [table, node.inputs[1]], [ir.AttrInt64("axis", 0)], name=f"{node.name}_offsets")
    by_weight = ir.Node("", "Unsqueeze", [looked_up.outputs[0], _last(graph)], name=f"{node.name}_by_weight")
    by_block = _shape(graph, [0] * (rank - 1) + [num_blocks, block_size])
    split = ir.Node("", "Reshape", [by_weight.outputs[0], by_block], name=f"{node.name}_blocks")
    added = ir.Node("", "Add", [split.outputs[0], by_weight.outputs[0]], name=f"{node.name}_with_offsets")
    whole = ir.Node("", "Reshape", [added.outputs[0], _shape(graph, [0] * (rank - 1) + [-1])], name=f"{node.name}_rows")
    graph.insert_after(node, [looked_up, by_weight, split, added, whole])
    _put_behind(node, whole.outputs[0])
    split.replace_input_with(0, node.outputs[0])


def _rank_of(value: ir.Value | None, node: ir.Node) -> int:
    if value is None or value.shape is None:
        raise ir.passes.PreconditionError(f"the rank of the rows of {node.name!r} is not known")
    return len(value.shape)


def _shape(graph: ir.Graph, sizes: list[int]) -> ir.Value:
    return add_constant(graph, f"rows_as.{'.'.join(map(str, sizes))}", np.array(sizes, np.int64))


def _last(graph: ir.Graph) -> ir.Value:
    return add_constant(graph, "last_axis", np.array([-1], np.int64))


def _put_behind(node: ir.Node, whole: ir.Value) -> None:
    """Give the users of what `node` computes `whole` instead."""
    levels = node.outputs[0]
    take_over(levels, whole)
    levels.name, levels.type = f"{node.name}_levels", whole.type
