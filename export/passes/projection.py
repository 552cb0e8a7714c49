"""One matrix product for projections of the same rows: query, key and value; gate and up.

Owns: joining the weights, and handing the joined result to attention or to a `Split`. Does not own: which precision
the weights have (`quantise.py`).
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant, add_tensor, take_over
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS, BlockChoice, WeightFormats
from mirrorsd.export.weights.lazy_weight import LazyWeight, first_name, joined_rows, lazy_weight

Form = tuple[BlockChoice | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """`rows @ weight + bias`, the bias where there is one; `result` is what the rest of the graph reads."""

    product: ir.Node
    bias: ir.Value | None
    result: ir.Value

    @property
    def weight(self) -> ir.Value:
        """The constant matrix `[K, N]`."""
        weight = self.product.inputs[1]
        assert weight is not None  # `_projection` has looked
        return weight

    @property
    def width(self) -> int:
        """How many numbers a row of the result has."""
        return int(self.weight.shape[1])  # type: ignore[index,arg-type]


class JoinProjections(ir.passes.InPlacePass):
    """Join products of the same value with constant weights into one; a pass over few rows is then faster.

    Weights `[K, 6]` and `[K, 2]` become one `[K, 8]`; a `Split` gives the 6 and the 2 back. Attention whose query, key
    and value are exactly one such group reads the joined rows itself, without a `Split`.
    Weights are joined with those of the same form: by their `formats`, or as they are in a file.
    Ensures: no two float products of the same value with constant weights of one form are left.
    """

    def __init__(self, formats: WeightFormats = FLOAT_WEIGHTS) -> None:
        self._formats = formats

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Join every group of `model`."""
        groups = self._groups(model.graph)
        for group in groups:
            _join(model.graph, group)
        return ir.passes.PassResult(model, modified=bool(groups))

    def ensures(self, model: ir.Model) -> None:
        """Check that no group is left."""
        if self._groups(model.graph):
            raise ir.passes.PostconditionError("two products of the same rows are left")

    def _groups(self, graph: ir.Graph) -> list[list[_Projection]]:
        """Projections of the same value, biased ones apart from the others, in the order of the graph."""
        by_rows: dict[tuple[ir.Value | None, bool, Form], list[_Projection]] = {}
        for node in graph:
            projection = _projection(node)
            if projection is not None:
                form = self._form(projection)
                by_rows.setdefault((node.inputs[0], projection.bias is not None, form), []).append(projection)
        return [group for group in by_rows.values() if len(group) > 1]

    def _form(self, projection: _Projection) -> Form:
        weight = projection.weight.const_value
        if not isinstance(weight, LazyWeight):
            return None, None
        key, carried = weight.transposed().key, self._formats.carried
        return self._formats.of_layer(first_name(key)), None if carried is None else carried.form(key)


def _projection(node: ir.Node) -> _Projection | None:
    """Match MatMul with a constant matrix, and the sum with a constant bias if that is all its result is for."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    result = node.outputs[0]
    users = [use.node for use in result.uses()]
    if len(users) == 1 and users[0].op_type == "Add" and not result.is_graph_output():
        other = next((operand for operand in users[0].inputs if operand is not result), None)
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
            return _Projection(product=node, bias=other, result=users[0].outputs[0])
    return _Projection(product=node, bias=None, result=result)


def _join(graph: ir.Graph, group: list[_Projection]) -> None:
    first = group[0].product
    joined = _product(graph, group)
    attention = _attention_of(group)
    if attention is not None:
        attention.replace_input_with(0, joined)
        attention.replace_input_with(1, None)
        attention.replace_input_with(2, None)
    else:
        widths = add_constant(graph, f"{group[0].weight.name}.widths", np.array([p.width for p in group], np.int64))
        split = ir.Node("", "Split", [joined, widths], [ir.AttrInt64("axis", -1)], num_outputs=len(group))
        graph.insert_before(first, split)
        for projection, part in zip(group, split.outputs, strict=True):
            take_over(projection.result, part)
    for projection in group:
        nodes = [projection.product] if projection.bias is None else [projection.result.producer(), projection.product]
        graph.remove([node for node in nodes if node is not None], safe=True)


def _product(graph: ir.Graph, group: list[_Projection]) -> ir.Value:
    """Insert the joined product, and the joined bias if they have one, before the group's first product."""
    first = group[0].product
    weight = _joined_constant(graph, [projection.weight for projection in group])
    nodes = [ir.Node("", "MatMul", [first.inputs[0], weight], name=first.name)]
    biases = [projection.bias for projection in group if projection.bias is not None]
    if biases:
        nodes.append(ir.Node("", "Add", [nodes[0].outputs[0], _joined_constant(graph, biases)]))
    shape = group[0].result.shape
    for node in nodes:
        node.outputs[0].type = group[0].result.type
        if shape is not None:
            node.outputs[0].shape = ir.Shape([*shape[:-1], sum(projection.width for projection in group)])
    graph.insert_before(first, nodes)
    return nodes[-1].outputs[0]


def _attention_of(group: list[_Projection]) -> ir.Node | None:
    """The attention node whose query, key and value are the group's three results, each used nowhere else."""
    users = [[use.node for use in projection.result.uses()] for projection in group]
    attention = users[0][0] if users[0] else None
    if len(group) != 3 or attention is None or attention.op_type != "GroupQueryAttention":
        return None
    is_all = all(nodes == [attention] for nodes in users)
    is_in_order = list(attention.inputs[:3]) == [projection.result for projection in group]
    return attention if is_all and is_in_order else None


def _joined_constant(graph: ir.Graph, values: list[ir.Value]) -> ir.Value:
    """The constants side by side along their last axis; matrices are joined as rows of their transposes."""
    weights = [lazy_weight(value.const_value) for value in values if value.const_value is not None]
    if len(weights[0].shape) == 1:
        joined = joined_rows(weights)
    else:
        joined = joined_rows([weight.transposed() for weight in weights]).transposed()
    return add_tensor(graph, "+".join(str(value.name) for value in values), joined)
