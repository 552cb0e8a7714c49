"""Fold Hugging Face's rotary arithmetic into `GroupQueryAttention` (`do_rotary = 1`), or a node of its own.

Owns: recognising `x * cos[positions] + rotate_half(x) * sin[positions]`, in front of an attention node or anywhere.
Does not own: the tables' values (`rotary_tables.py`).
"""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant, take_over
from mirrorsd.graphs.errors import ExportError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotated:
    """One rotated projection: what was rotated (`[1, heads, S, hd]`) and the tables `[positions, hd]`.

    With `has_halves` each half was rotated by itself, and the tables are half as wide. `positions` are the rows of the
    tables, where both tables are gathered by one value.
    """

    source: ir.Value
    cos_table: ir.Value
    sin_table: ir.Value
    has_halves: bool = False
    positions: ir.Value | None = None


class FoldRotary(ir.passes.InPlacePass):
    """Let attention rotate queries and keys itself.

    Requires: rotation in HF's form, with tables gathered by position. Where an attention node has none of it
    (layers without rotary positions) it is left alone. Ensures: no arithmetic of positions is left.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold every attention node of `model`."""
        num_folded = 0
        for node in list(model.graph):
            if node.op_type != "GroupQueryAttention":
                continue
            query, key = (_match_rotated(node.inputs[i]) for i in (0, 1))
            if query is None or key is None:
                continue
            self._fold(model.graph, node, query, key)
            num_folded += 1
        return ir.passes.PassResult(model, modified=num_folded > 0)

    def ensures(self, model: ir.Model) -> None:
        """Check that no rotated projection is left in front of an attention node."""
        for node in model.graph:
            if node.op_type == "GroupQueryAttention" and _match_rotated(node.inputs[0]) is not None:
                raise ir.passes.PostconditionError(f"attention node {node.name} still has rotary arithmetic before it")

    def _fold(self, graph: ir.Graph, node: ir.Node, query: _Rotated, key: _Rotated) -> None:
        cos, sin = (
            table if query.has_halves else _half_table(graph, table) for table in (query.cos_table, query.sin_table)
        )
        merged = [_merge_heads(graph, node, rotated.source) for rotated in (query, key)]
        attributes = [a for name, a in node.attributes.items() if name != "do_rotary"]
        attributes += [ir.AttrInt64("do_rotary", 1), ir.AttrInt64("rotary_interleaved", 0)]
        outputs = list(node.outputs)
        folded = ir.Node(
            node.domain,
            node.op_type,
            [*merged, *node.inputs[2:7], cos, sin, *node.inputs[9:]],
            attributes,
            num_outputs=len(outputs),
            name=node.name,
        )
        graph.insert_before(node, folded)
        for old, new in zip(outputs, folded.outputs, strict=True):
            take_over(old, new)
        graph.remove(node, safe=True)


class FuseRotary(ir.passes.InPlacePass):
    """Write every rotation in HF's form as one `RotaryEmbedding`, where no attention node can take it in.

    Twelve small nodes a layer cost an ordinary draft's round on a processor a fifteenth of its time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every rotation of `model`."""
        rotations = [(node, _match_rotation(node.outputs[0])) for node in model.graph if node.op_type == "Add"]
        num_fused = 0
        for node, rotated in rotations:
            if rotated is None or rotated.positions is None or not _has_equal_halves(rotated):
                continue
            self._fuse(model.graph, node, rotated)
            num_fused += 1
        if num_fused:
            model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=num_fused > 0)

    def _fuse(self, graph: ir.Graph, node: ir.Node, rotated: _Rotated) -> None:
        tables = [_half_table(graph, table) for table in (rotated.cos_table, rotated.sin_table)]
        inputs = [rotated.source, rotated.positions, *tables]
        fused = ir.Node("com.microsoft", "RotaryEmbedding", inputs, [ir.AttrInt64("interleaved", 0)], name=node.name)
        graph.insert_before(node, fused)
        take_over(node.outputs[0], fused.outputs[0])
        graph.remove(node, safe=True)


def _match_rotated(value: ir.Value | None) -> _Rotated | None:
    """Match Reshape(Transpose(rotation of x)), where x is a projection or the first part of one."""
    rotated = _input_of(_input_of(value, "Reshape"), "Transpose")
    joined = _producer(rotated, "Concat")
    if joined is None:
        return _match_rotation(rotated)
    if _producer(joined.inputs[0], "Sub") is not None:
        return _match_halves(joined)
    whole = _input_of(joined.inputs[1], "Slice")
    part = _match_rotation(joined.inputs[0])
    if part is None or whole is None or not _is_first_part(part, whole):
        return None
    return replace(part, source=whole)


def _is_first_part(part: _Rotated, whole: ir.Value) -> bool:
    """Say whether attention can rotate just the first entries of each head: `part` is `whole[..., :width]`.

    Half the width must be a multiple of 8, which is what the attention kernels ask for.
    """
    assert part.cos_table.const_value is not None  # `_gathered_table` has seen it
    width = part.cos_table.const_value.numpy().shape[1]
    cut = _producer(part.source, "Slice")
    if cut is None:
        return part.source is whole
    starts = cut.inputs[1]
    is_at_start = starts is not None and starts.const_value is not None and not starts.const_value.numpy().any()
    return cut.inputs[0] is whole and is_at_start and width % 16 == 0


def _match_rotation(value: ir.Value | None) -> _Rotated | None:
    """Match x * U(cos) + Concat(-x[half:], x[:half]) * U(sin)."""
    add = _producer(value, "Add")
    if add is None:
        return None
    straight, turned = (_producer(operand, "Mul") for operand in add.inputs)
    if straight is None or turned is None:
        return None
    if _producer(straight.inputs[0], "Concat") is not None:
        straight, turned = turned, straight
    source = straight.inputs[0]
    concat = _producer(turned.inputs[0], "Concat")
    cos_table, sin_table = (_gathered_table(operand.inputs[1]) for operand in (straight, turned))
    if concat is None or source is None or cos_table is None or sin_table is None:
        return None
    upper_half = _input_of(_input_of(concat.inputs[0], "Neg"), "Slice")
    if upper_half is not source or _input_of(concat.inputs[1], "Slice") is not source:
        return None
    places = [_input_of(operand.inputs[1], "Unsqueeze") for operand in (straight, turned)]
    gathered = [place.producer() for place in places if place is not None]
    by = {node.inputs[1] for node in gathered if node is not None}
    return _Rotated(
        source=source, cos_table=cos_table, sin_table=sin_table, positions=by.pop() if len(by) == 1 else None
    )


def _match_halves(joined: ir.Node) -> _Rotated | None:
    """Match Concat(a * U(cos) - b * U(sin), b * U(cos) + a * U(sin)), where a and b are the halves of x."""
    sums = (_producer(joined.inputs[0], "Sub"), _producer(joined.inputs[1], "Add"))
    factors = [_factors(operand) for total in sums if total is not None for operand in total.inputs]
    if len(factors) != 4 or None in factors:
        return None
    (upper, cos), (lower, sin), *turned = (pair for pair in factors if pair is not None)
    split = None if upper is None else upper.producer()
    if split is None or cos is None or sin is None or turned != [(lower, cos), (upper, sin)]:
        return None
    if split.op_type != "Split" or list(split.outputs) != [upper, lower] or split.inputs[0] is None:
        return None
    return _Rotated(source=split.inputs[0], cos_table=cos, sin_table=sin, has_halves=True)


def _factors(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None] | None:
    """What is multiplied with which gathered table."""
    product = _producer(value, "Mul")
    return None if product is None else (product.inputs[0], _gathered_table(product.inputs[1]))


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _input_of(value: ir.Value | None, op_type: str) -> ir.Value | None:
    node = _producer(value, op_type)
    return None if node is None else node.inputs[0]


def _gathered_table(value: ir.Value | None) -> ir.Value | None:
    """The initializer in Unsqueeze(Gather(table, positions))."""
    table = _input_of(_input_of(value, "Unsqueeze"), "Gather")
    return table if table is not None and table.const_value is not None else None


def _has_equal_halves(rotated: _Rotated) -> bool:
    """Whether the halves of both tables are equal, as in HF's usual form."""
    tables = [table.const_value for table in (rotated.cos_table, rotated.sin_table)]
    halves = [np.split(table.numpy(), 2, axis=1) for table in tables if table is not None]
    return len(halves) == 2 and all(np.array_equal(first, second) for first, second in halves)


def _half_table(graph: ir.Graph, table: ir.Value) -> ir.Value:
    """Register the first half of `table` `[positions, hd]`, once per graph.

    Raises:
        ExportError: the halves differ, so the rotation is not of HF's usual form.
    """
    name = f"{table.name}.half"
    if name in graph.initializers:
        return graph.initializers[name]
    assert table.const_value is not None  # `_gathered_table` has seen it
    array = table.const_value.numpy()
    half = array.shape[1] // 2
    if not np.array_equal(array[:, :half], array[:, half:]):
        raise ExportError(
            f"rotary table {table.name!r} has two different halves: this kind of rotary position is not supported."
        )
    return add_constant(graph, name, np.ascontiguousarray(array[:, :half]))


def _merge_heads(graph: ir.Graph, before: ir.Node, source: ir.Value) -> ir.Value:
    """Give `[1, S, heads * hd]` for `source` `[1, heads, S, hd]`, undoing its Transpose and Reshape if any."""
    by_row = _input_of(source, "Transpose")
    projection = _input_of(by_row, "Reshape")
    if projection is not None:
        return projection
    by_row = _by_row(graph, before, source) if by_row is None else by_row
    if by_row.shape is None:
        raise ExportError(f"{source.name!r} is rotated but its shape is not known: not supported.")
    width = int(by_row.shape[2]) * int(by_row.shape[3])  # type: ignore[arg-type]
    merged_shape = add_constant(graph, f"merge_heads.{width}", np.array([0, 0, width], dtype=np.int64))
    reshape = ir.Node("", "Reshape", [by_row, merged_shape])
    reshape.outputs[0].type = by_row.type
    graph.insert_before(before, reshape)
    return reshape.outputs[0]


def _by_row(graph: ir.Graph, before: ir.Node, source: ir.Value) -> ir.Value:
    """Transpose `source` `[1, heads, S, hd]`, such as a norm of transposed heads, to `[1, S, heads, hd]`."""
    transpose = ir.Node("", "Transpose", [source], [ir.AttrInt64s("perm", [0, 2, 1, 3])])
    by_row = transpose.outputs[0]
    by_row.type = source.type
    if source.shape is not None:
        by_row.shape = ir.Shape([source.shape[axis] for axis in (0, 2, 1, 3)])
    graph.insert_before(before, transpose)
    return by_row
