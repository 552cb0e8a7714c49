"""Attention over one row computed exactly as over many.

ONNX Runtime's CPU kernels multiply one row by another routine than several, which adds in another order; in attention
that is where a row's last bits come to depend on how many rows are in its pass (elsewhere only some integer products do
that, see docs/exactness.md). With a row of zeros behind the others there are always at least two.

Owns: the row of zeros, and taking it away again. Does not own: the caches' place for it (`TargetEntry.capacity`), or
counting it (`seqlens_k` and `total_length` do).
"""

import numpy as np
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant

__all__ = ["SPARE_ROWS", "AddSpareRows"]

SPARE_ROWS = 1
_ROW_INPUTS = 3


class AddSpareRows(ir.passes.InPlacePass):
    """Put `SPARE_ROWS` rows of zeros behind the queries, keys and values of every attention node.

    Requires: nodes over share-buffer caches whose lengths count these rows. Ensures: what a node gives has as many rows
    as the pass; the caches get keys and values of zeros behind the pass's own, where the next pass writes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Edit every attention node of `model`."""
        nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
        for node in nodes:
            _add_spare_rows(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _add_spare_rows(graph: ir.Graph, node: ir.Node) -> None:
    """`attention(rows)` becomes `attention(rows + zeros)[:-1]`."""
    pads = add_constant(graph, "spare_row_pads", np.array([0, 0, 0, 0, SPARE_ROWS, 0], np.int64))
    for index, rows in enumerate(node.inputs[:_ROW_INPUTS]):
        if rows is None:
            continue
        padded = ir.Node("", "Pad", [rows, pads], name=f"{node.name}_spare_{index}")
        padded.outputs[0].type, padded.outputs[0].name = rows.type, f"{node.name}_spare_rows_{index}"
        graph.insert_before(node, padded)
        node.replace_input_with(index, padded.outputs[0])
    start = add_constant(graph, "spare_row_start", np.array([0], np.int64))
    end = add_constant(graph, "spare_row_end", np.array([-SPARE_ROWS], np.int64))
    axis = add_constant(graph, "spare_row_axis", np.array([1], np.int64))
    attended = node.outputs[0]
    kept = ir.Node("", "Slice", [attended, start, end, axis], name=f"{node.name}_own_rows")
    kept.outputs[0].type, kept.outputs[0].shape = attended.type, attended.shape
    kept.outputs[0].name = f"{node.name}_own_rows"
    attended.replace_all_uses_with(kept.outputs[0])
    kept.replace_input_with(0, attended)
    attended.shape = None
    graph.insert_after(node, kept)
