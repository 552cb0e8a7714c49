"""Products of integers: weights in 8 bits by row, and what they are multiplied with rounded to 8 bits by row as well.

Sums of integers are exact, so that a row has the same bits in passes of any number of rows, and a processor multiplies
eight rows in hardly more than the time of one. Behind a norm the numbers' range is known from the calibration text and
is divided out in the norm's own weights: there a product is two nodes, elsewhere six, and nine where rows are rotated.

Owns: the nodes of such a product, of a look-up in such a table, and where a scaling is divided out. Does not own: which
weights have this form (`quantise.py`), the scaling itself (`input_scaling.py`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant, add_tensor, take_over
from mirrorsd.export.weights.block_formats import InputScaling
from mirrorsd.export.weights.block_quantisation import TOP_LEVEL
from mirrorsd.export.weights.lazy_weight import LazyWeight, lazy_weight
from mirrorsd.export.weights.rotation import ROTATED, signs

Factors = npt.NDArray[np.float32]

_CONTRIB = "com.microsoft"
_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_MIDDLE = 128
_SCALES = 3
"""Which input of `MatMulIntegerToFloat` the scales of the weight's columns are."""
_UNIT = np.float32(1 / TOP_LEVEL)


class IntegerProducts:
    """Writes products of integers into one graph; what several products share is computed once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rounded: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value | None, np.float32]] = {}

    def replace(self, node: ir.Node, parts: list[ir.Value], scaling: InputScaling | None, *, by_output: bool) -> None:
        """Put an integer product in the place of the float product `node`.

        Args:
            node: A MatMul, or a Gemm with `transB`.
            parts: int8 levels, `[N, K]` with `by_output` and `[K, N]` without; scales of the rows `[N]`.
            scaling: Of the rows that are multiplied; the levels are those of the scaled weight.
            by_output: Whether this is a Gemm.
        """
        rows = node.inputs[0]
        assert rows is not None  # a product has rows
        levels, most, unit = self._round(node, rows, scaling)
        scale = self._scalar(unit)
        weights, scales = parts
        middle = add_constant(self._graph, "middle_level", np.array(_MIDDLE, np.uint8))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if by_output:
            num_rows = int(weights.shape[0])  # type: ignore[index, arg-type]
            zeros = add_constant(self._graph, f"{node.name}.zero_levels", np.zeros(num_rows, np.int8))
            inputs = [levels, scale, middle, weights, scales, zeros]
            product = ir.Node(_CONTRIB, "QGemm", inputs, [ir.AttrInt64("transB", 1)], name=node.name)
        else:
            inputs = [levels, weights, scale, scales, middle]
            product = ir.Node(_CONTRIB, "MatMulIntegerToFloat", inputs, name=node.name)
        nodes = [product]
        if most is not None:
            nodes.append(ir.Node("", "Mul", [product.outputs[0], most], name=f"{node.name}_by_row"))
        if bias is not None:
            nodes.append(ir.Node("", "Add", [nodes[-1].outputs[0], bias], name=f"{node.name}_biased"))
        self._graph.insert_before(node, nodes)
        for made in nodes[:-1]:
            made.outputs[0].type, made.outputs[0].name = ir.TensorType(ir.DataType.FLOAT), f"{made.name}_levels"
        take_over(node.outputs[0], nodes[-1].outputs[0])
        self._graph.remove(node, safe=True)

    def replace_look_up(self, node: ir.Node, parts: list[ir.Value], scaling: InputScaling | None) -> None:
        """Put a look-up in int8 levels `[V, K]` with scales `[V]` in the place of the Gather `node`."""
        ids, (levels, scales), name = node.inputs[1], parts, node.name
        last = add_constant(self._graph, "last_axis", np.array([-1], np.int64))
        found = ir.Node("", "Gather", [levels, ids], name=f"{name}_levels")
        numbers = ir.Node("", "Cast", [found.outputs[0]], [ir.AttrInt64("to", ir.DataType.FLOAT)], name=f"{name}_cast")
        scale = ir.Node("", "Gather", [scales, ids], name=f"{name}_scales")
        column = ir.Node("", "Unsqueeze", [scale.outputs[0], last], name=f"{name}_column")
        nodes = [found, numbers, scale, column]
        nodes.append(ir.Node("", "Mul", [numbers.outputs[0], column.outputs[0]], name=f"{name}_rows"))
        if scaling is not None and scaling.factors is not None:
            undone = add_constant(
                self._graph, f"{levels.name}.inverse_factors", (1 / scaling.factors).astype(np.float32)
            )
            nodes.append(ir.Node("", "Mul", [nodes[-1].outputs[0], undone], name=f"{name}_unscaled"))
        self._graph.insert_before(node, nodes)
        for made in nodes[:-1]:
            made.outputs[0].name = f"{made.name}.found"
        take_over(node.outputs[0], nodes[-1].outputs[0])
        self._graph.remove(node, safe=True)

    def _round(
        self, node: ir.Node, rows: ir.Value, scaling: InputScaling | None
    ) -> tuple[ir.Value, ir.Value | None, np.float32]:
        """Levels uint8 of `rows`, each row's largest magnitude if they are by row, and the constant scale."""
        key = (rows, "" if scaling is None else str(id(scaling)))
        if key not in self._rounded:
            factors, largest = (None, None) if scaling is None else (scaling.factors, scaling.largest)
            scaled = rows if factors is None else self._scaled(node, rows, factors)
            if scaling is not None and scaling.is_rotated:
                scaled = self._rotated(node, scaled)
            self._rounded[key] = self._round_alike(scaled, largest) if largest else self._round_by_row(scaled)
        return self._rounded[key]

    def _round_alike(self, rows: ir.Value, largest: float) -> tuple[ir.Value, None, np.float32]:
        unit = np.float32(largest) * _UNIT
        rounded = self._quantise(rows, unit)
        self._insert_behind(rows, [rounded])
        return rounded.outputs[0], None, unit

    def _round_by_row(self, rows: ir.Value) -> tuple[ir.Value, ir.Value, np.float32]:
        """A row of zeros is 0 / 0 here, whatever level that becomes: its product is multiplied with 0 in the end."""
        axis = add_constant(self._graph, "last_axis", np.array([-1], np.int64))
        size = ir.Node("", "Abs", [rows], name=f"{rows.name}_size")
        most = ir.Node(
            "", "ReduceMax", [size.outputs[0], axis], [ir.AttrInt64("keepdims", 1)], name=f"{rows.name}_most"
        )
        shares = ir.Node("", "Div", [rows, most.outputs[0]], name=f"{rows.name}_shares")
        rounded = self._quantise(shares.outputs[0], _UNIT, rows)
        nodes = [size, most, shares, rounded]
        self._insert_behind(rows, nodes)
        for made in nodes[:-1]:
            made.outputs[0].name, made.outputs[0].type = f"{made.name}.row", rows.type
        return rounded.outputs[0], most.outputs[0], _UNIT

    def _quantise(self, rows: ir.Value, unit: np.float32, named: ir.Value | None = None) -> ir.Node:
        middle = add_constant(self._graph, "middle_level", np.array(_MIDDLE, np.uint8))
        name = f"{(named or rows).name}_rounded"
        rounded = ir.Node("", "QuantizeLinear", [rows, self._scalar(unit), middle], name=name)
        rounded.outputs[0].name, rounded.outputs[0].type = name, ir.TensorType(ir.DataType.UINT8)
        return rounded

    def _scalar(self, value: np.float32) -> ir.Value:
        return add_constant(self._graph, f"scale.{value!r}", np.array(value, np.float32))

    def _scaled(self, node: ir.Node, rows: ir.Value, factors: Factors) -> ir.Value:
        """`rows` over the factors: in the weights of the norm or the product that makes them, or by a node."""
        made_by = rows.producer()
        if made_by is not None and _is_for_one(rows, node):
            place = _weight_place(made_by)
            if place is not None:
                self._divide_norm(made_by, place, factors)
                return rows
            if made_by.op_type == "Mul" and self._divide_product(made_by, factors):
                return rows
        inverse = add_constant(self._graph, f"{node.name}.inverse_factors", (1 / factors).astype(np.float32))
        divided = ir.Node("", "Mul", [rows, inverse], name=f"{node.name}_scaled")
        divided.outputs[0].name, divided.outputs[0].type = f"{node.name}_scaled", rows.type
        divided.outputs[0].shape = rows.shape
        self._insert_behind(rows, [divided])
        return divided.outputs[0]

    def _rotated(self, node: ir.Node, rows: ir.Value) -> ir.Value:
        """`rows` `[.., K]`, every `ROTATED` of a row's numbers into each other: a product with no single row."""
        assert rows.shape is not None
        kept, width = [0] * (len(rows.shape) - 1), int(rows.shape[-1])  # type: ignore[arg-type]
        parts = add_constant(self._graph, f"parts.{width}", np.array([*kept, width // ROTATED, ROTATED], np.int64))
        whole = add_constant(self._graph, f"whole.{width}", np.array([*kept, width], np.int64))
        scale = [ir.AttrFloat32("alpha", ROTATED**-0.5)]
        blocks = ir.Node("", "Reshape", [rows, parts], name=f"{node.name}_blocks")
        matrix = add_constant(self._graph, "rotation", signs())
        mixed = ir.Node(_CONTRIB, "FusedMatMul", [blocks.outputs[0], matrix], scale, name=f"{node.name}_mixed")
        found = ir.Node("", "Reshape", [mixed.outputs[0], whole], name=f"{node.name}_rotated")
        for made in (blocks, mixed, found):
            made.outputs[0].name, made.outputs[0].type = made.name, rows.type
        found.outputs[0].shape = rows.shape
        self._insert_behind(rows, [blocks, mixed, found])
        return found.outputs[0]

    def _insert_behind(self, rows: ir.Value, nodes: list[ir.Node]) -> None:
        made_by = rows.producer()
        if made_by is None:
            self._graph.insert_before(self._graph[0], nodes)
        else:
            self._graph.insert_after(made_by, nodes)

    def _divide_norm(self, norm: ir.Node, place: int, factors: Factors) -> None:
        weight = norm.inputs[place]
        assert weight is not None and weight.const_value is not None  # `_weight_place` has looked
        self._replace_constant(norm, place, factors)

    def _divide_product(self, gated: ir.Node, factors: Factors) -> bool:
        """Divide `gated`, a gate times an integer product, in the scales of that product's columns."""
        for operand in gated.inputs:
            found = None if operand is None else _columns_of(operand)
            if found is not None:
                node, start = found
                whole = np.ones(_width(node), np.float32)
                whole[start : start + len(factors)] = factors
                self._replace_constant(node, _SCALES, whole)
                return True
        return False

    def _replace_constant(self, node: ir.Node, place: int, factors: Factors) -> None:
        """Divide a constant of `node`: known by its numbers and the factors, as graphs name their nodes alike."""
        value = node.inputs[place]
        assert value is not None and value.const_value is not None
        source, over = lazy_weight(value.const_value), lazy_weight(ir.tensor(np.ascontiguousarray(factors)))

        def chunks() -> Iterator[npt.NDArray[Any]]:
            whole = np.concatenate([chunk.reshape(-1) for chunk in source.chunks()])
            yield (whole / factors).astype(whole.dtype)

        divided = LazyWeight(f"{source.key} over {over.key}", source.dtype, tuple(source.shape.numpy()), chunks)
        node.replace_input_with(place, add_tensor(self._graph, divided.key, divided))


def _width(product: ir.Node) -> int:
    scales = product.inputs[_SCALES]
    assert scales is not None and scales.shape is not None
    return int(scales.shape.numpy()[0])


def _columns_of(operand: ir.Value) -> tuple[ir.Node, int] | None:
    """The integer product without a bias whose columns `operand` is, and the first of them; for nothing else."""
    node, start = operand.producer(), 0
    if len(operand.uses()) != 1:
        return None
    if node is not None and node.op_type == "Split":
        widths = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
        if widths is None:  # into equal parts, or into such as only a pass knows: a node divides then
            return None
        start = int(sum(widths.numpy()[: operand.index()]))
        joined = node.inputs[0]
        node = None if joined is None or len(joined.uses()) != 1 else joined.producer()
    if node is not None and node.op_type == "Mul" and node.name and node.name.endswith("_by_row"):
        levels = node.inputs[0]
        node = None if levels is None else levels.producer()
    return (node, start) if node is not None and node.op_type == "MatMulIntegerToFloat" else None


def _is_for_one(rows: ir.Value, node: ir.Node) -> bool:
    """Whether nothing reads `rows` but `node`: what else does would find them scaled."""
    return all(use.node is node for use in rows.uses()) and not rows.is_graph_output()


def _weight_place(norm: ir.Node) -> int | None:
    """Which input of a norm its weights are; None where they are not constant, or where this is no norm."""
    if norm.op_type not in _NORMS:
        return None
    place = 1 if norm.op_type == "SimplifiedLayerNormalization" else 2
    weight = norm.inputs[place]
    return place if weight is not None and weight.const_value is not None else None
