"""Weights as integers: in blocks for `MatMulNBits` and `GatherBlockQuantized`, or by row for products of integers.

Owns: which weights of a graph are packed, and the nodes that read blocks. Does not own: the formats
(`block_formats.py`), the nodes that read integers by row (`integer_products.py`),
the packing itself (`block_quantisation.py`, `aware_quantisation.py`), undoing it (`rounded_weights.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mirrorsd.export.passes.block_offsets import add_to_look_up, add_to_product
from mirrorsd.export.passes.graph_edits import add_tensor, take_over
from mirrorsd.export.passes.integer_products import IntegerProducts
from mirrorsd.export.weights.block_formats import BlockChoice, BlockFormat, InputScaling, WeightFormats
from mirrorsd.export.weights.block_quantisation import pack_levels, quantise_rows
from mirrorsd.export.weights.gguf_tensors import CarriedWeight
from mirrorsd.export.weights.lazy_weight import LazyWeight, Pack, first_name, lazy_weight, pack_rows, packed_parts
from mirrorsd.graphs import names

Array = npt.NDArray[Any]
ChoosePack = Callable[[str, BlockFormat], tuple[str, Pack]]

_INT8_ACTIVATIONS = 4
_CONTRIB = "com.microsoft"
_OF_FILE = "of the file"
_OF_LAYERS = "layers."
"""How the names of a stage's nodes begin that are a layer's (`stamping.py`)."""


def round_to_nearest(key: str, chosen: BlockFormat) -> tuple[str, Pack]:
    """Give the recipe's name and the packing of the weight `key`, whatever it is."""
    return chosen.recipe, partial(quantise_rows, chosen=chosen)


class QuantiseWeights(ir.passes.InPlacePass):
    """Pack the constant weights of products and of the token embedding in their formats; None leaves them as they are.

    The embedding's format is symmetric; a table whose rows are no whole blocks stays as it is.

    The head is the `Gemm` with transB that is `head_width` wide; the embedding is what a text's ids gather from. Where
    a stage looks up what it has chosen itself, every table of `head_width` rows is one: in a drafting head, and for the
    best tokens of a scan. Equal weights in equal formats give equal tensors, so a tied embedding and head stay one.
    Weights that the formats carry from a file keep its blocks. Products with `lent` weights, by name, have the format
    given there: a drafting head's layers that are its target's own are packed as the target's, and so stay one.
    Ensures: no float matrix product with constant weights is left, but for a head without a format, floats of the file
    that the formats carry from, and what its blocks are offset by.
    """

    def __init__(
        self,
        formats: WeightFormats,
        head_width: int,
        choose_pack: ChoosePack = round_to_nearest,
        lent: Mapping[str, BlockChoice | None] = MappingProxyType({}),
    ) -> None:
        self._formats, self._lent = formats, lent
        self._head_width = head_width
        self._choose_pack = choose_pack

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Pack the weights of `model`."""
        integers = IntegerProducts(model.graph)
        packed = [self._pack_node(model.graph, node, integers) for node in list(model.graph)]
        if any(packed):
            model.opset_imports[_CONTRIB] = 1
        return ir.passes.PassResult(model, modified=any(packed))

    def ensures(self, model: ir.Model) -> None:
        """Check that nothing was overlooked."""
        left = [node for node in model.graph if _weight_of(node) is not None]
        if self._formats.layers is not None and any(self._product_format(node) is not None for node in left):
            raise ir.passes.PostconditionError("a matrix product with float weights is left")

    def _pack_node(self, graph: ir.Graph, node: ir.Node, integers: IntegerProducts) -> bool:
        table = _embedding_of(node) or self._table_of(graph, node)
        if table is not None and self._formats.embedding is not None and not self._is_kept(table):
            assert table.const_value is not None  # a table has numbers
            if not self._formats.embedding.has_whole_blocks(int(table.const_value.shape.numpy()[1])):
                return False
            if self._formats.embedding.is_by_row:
                source = self._scaled(table)
                integers.replace_look_up(node, self._pack_by_row(graph, source), self._scaling_of(table))
            else:
                self._replace_gather(graph, node, table, self._formats.embedding)
            return True
        weight = _weight_of(node)
        chosen = None if weight is None else self._product_format(node)
        if weight is None or chosen is None:
            return False
        if chosen.is_by_row:
            by_output = _is_by_output(node)
            parts = self._pack_by_row(graph, self._scaled(weight, node), is_turned=not by_output)
            integers.replace(node, parts, self._scaling_of(weight), by_output=by_output)
        else:
            self._replace_product(graph, node, weight, chosen)
        return True

    def _scaling_of(self, weight: ir.Value) -> InputScaling | None:
        tensor = weight.const_value
        return self._formats.inputs.get(first_name(tensor.key)) if isinstance(tensor, LazyWeight) else None

    def _scaled(self, weight: ir.Value, node: ir.Node | None = None) -> LazyWeight:
        """The weight `[N, K]` of a product or a table, times the factors of its inputs."""
        assert weight.const_value is not None  # `_weight_of` has looked
        source = lazy_weight(weight.const_value)
        by_output = source if node is None or _is_by_output(node) else source.transposed()
        scaling = self._scaling_of(weight)
        return by_output if scaling is None else scaled_columns(by_output, scaling)

    def _pack_by_row(self, graph: ir.Graph, source: LazyWeight, *, is_turned: bool = False) -> list[ir.Value]:
        """Add int8 levels `[N, K]`, or turned `[K, N]`, and float32 scales `[N]`."""
        num_rows, width = (int(size) for size in source.shape.numpy())
        chosen = BlockFormat(bits=8, block_size=width, is_by_row=True)
        recipe, pack = round_to_nearest(source.key, chosen)
        levels, scales = pack_rows(source, recipe, pack, ((num_rows, width), (num_rows,)))
        parts = (levels.transposed() if is_turned else levels, scales)
        return [add_tensor(graph, f"{source.key}.{part.key}", part) for part in parts]

    def _is_kept(self, weight: ir.Value) -> bool:
        """Whether a weight is of the floats of a file, which stay, or what its blocks are offset by."""
        if self._formats.carried is None or not isinstance(weight.const_value, LazyWeight):
            return False
        key = weight.const_value.key
        return _OF_FILE in key or self._formats.carried.has_floats(key)

    def _table_of(self, graph: ir.Graph, node: ir.Node) -> ir.Value | None:
        """The constant table in which a draft or a drafting head looks tokens up, or a scan its best ones."""
        if node.op_type != "Gather":
            return None
        ids = node.inputs[1]
        is_of_scan = ids is not None and (made_by := ids.producer()) is not None and made_by.op_type == "TopK"
        is_of_head = any(value.name in (names.HEAD_TOKENS, names.DRAFT_TIP_ROWS) for value in graph.inputs)
        table = node.inputs[0] if is_of_head or is_of_scan else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            return None
        is_by_row = node.attributes.get_int("axis", 0) == 0
        return table if is_by_row and table.const_value.shape[0] == self._head_width else None

    def _product_format(self, node: ir.Node) -> BlockChoice | None:
        weight = node.inputs[1]
        assert weight is not None and weight.const_value is not None  # `_weight_of` has looked
        is_in_layer = (node.name or "").startswith(_OF_LAYERS)  # some are as wide as the vocabulary
        is_head = _is_by_output(node) and weight.const_value.shape[0] == self._head_width and not is_in_layer
        if not isinstance(weight.const_value, LazyWeight):
            return self._formats.of_head if is_head else self._formats.layers
        if self._is_kept(weight):
            return None
        name = first_name(weight.const_value.key)
        if name in self._lent:
            return self._lent[name]
        return self._formats.of_head if is_head else self._formats.of_layer(name)

    def _replace_product(self, graph: ir.Graph, node: ir.Node, weight: ir.Value, asked: BlockChoice) -> None:
        assert weight.const_value is not None  # `_weight_of` has looked
        source = lazy_weight(weight.const_value)
        by_output = source if _is_by_output(node) else source.transposed()
        num_rows, width = (int(size) for size in by_output.shape.numpy())
        carried = self._carried(by_output)
        chosen = asked.for_width(width) if carried is None else _format_of(carried)
        parts, offsets = self._pack(graph, by_output, chosen, carried, is_gather=False)
        inputs: list[ir.Value | None] = [node.inputs[0], *parts]
        if len(node.inputs) > 2:
            inputs += [None] * (5 - len(inputs)) + [node.inputs[2]]
        sizes = {"K": width, "N": num_rows, "accuracy_level": _INT8_ACTIVATIONS}
        if offsets is not None:
            add_to_product(graph, node, offsets, chosen.block_size)
        _replace(graph, node, "MatMulNBits", inputs, sizes | _block_sizes(chosen))

    def _carried(self, source: LazyWeight) -> CarriedWeight | None:
        return None if self._formats.carried is None else self._formats.carried.of(source.key)

    def _replace_gather(self, graph: ir.Graph, node: ir.Node, table: ir.Value, asked: BlockChoice) -> None:
        assert table.const_value is not None  # `_embedding_of` has looked
        source = lazy_weight(table.const_value)
        carried = self._carried(source)
        chosen = asked.for_width(int(source.shape.numpy()[1])) if carried is None else _format_of(carried)
        (data, scales, *zero_points), offsets = self._pack(graph, source, chosen, carried, is_gather=True)
        inputs = [data, node.inputs[1], scales, *(zero_points or [_middle_levels(graph, scales, chosen)])]
        if offsets is not None:
            add_to_look_up(graph, node, offsets, chosen.block_size)
        _replace(
            graph, node, "GatherBlockQuantized", inputs, {"gather_axis": 0, "quantize_axis": 1} | _block_sizes(chosen)
        )

    def _pack(
        self,
        graph: ir.Graph,
        source: LazyWeight,
        chosen: BlockFormat,
        carried: CarriedWeight | None,
        *,
        is_gather: bool,
    ) -> tuple[list[ir.Value], LazyWeight | None]:
        """Add the packed tensors of `source` `[N, K]`, and return its blocks' offsets `[N, B]` if there are any.

        The embedding reads the same bytes in two dimensions.
        """
        compute = source.dtype.numpy()
        num_rows, width = (int(size) for size in source.shape.numpy())
        num_blocks = -(-width // chosen.block_size)
        block_bytes = chosen.block_size * chosen.bits // 8
        data = (num_rows, num_blocks * block_bytes) if is_gather else (num_rows, num_blocks, block_bytes)
        scales = (num_rows, num_blocks) if is_gather else (num_rows * num_blocks,)
        zero_bytes = -(-num_blocks * chosen.bits // 8)
        zero_points = (num_rows, zero_bytes) if is_gather else (num_rows * zero_bytes,)
        shapes = (data, scales) if chosen.is_symmetric else (data, scales, zero_points)
        offsets = None
        if carried is None:
            recipe, pack = self._choose_pack(source.key, chosen)
            packed = pack_rows(source, recipe, partial(pack_as, pack, compute), shapes)
        else:
            recipe = _OF_FILE
            packed, offsets = _as_in_the_file(source.key, carried, shapes, (num_rows, num_blocks))
        kind = "rows" if is_gather else "weights"
        named = [add_tensor(graph, f"{source.key}.{recipe}.{kind}{number}", part) for number, part in enumerate(packed)]
        return named, offsets


def pack_as(pack: Pack, compute: np.dtype[Any], rows: Array) -> tuple[Array, ...]:
    """Pack `rows`, with scales of the kind that the stages compute in."""
    data, scales, *zero_points = pack(rows.astype(np.float32))
    return (data, scales.astype(compute), *zero_points)


def _as_in_the_file(
    key: str, carried: CarriedWeight, shapes: tuple[tuple[int, ...], ...], by_block: tuple[int, int]
) -> tuple[list[LazyWeight], LazyWeight | None]:
    """Levels, scales and zero points of a carried weight in `shapes`, and its offsets `by_block`."""

    def chunks() -> Iterator[tuple[Array, ...]]:
        for levels, scales, zero_points, offsets in carried.levels():
            packed = pack_levels(levels, scales, zero_points, carried.blocks.bits)
            yield packed if offsets is None else (*packed, offsets)

    dtypes = [ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8][: len(shapes)]
    if not carried.blocks.has_minima:
        return packed_parts(f"{key} {_OF_FILE}", chunks, dtypes, shapes), None
    *packed, offsets = packed_parts(f"{key} {_OF_FILE}", chunks, [*dtypes, ir.DataType.FLOAT], (*shapes, by_block))
    return packed, offsets


def _format_of(carried: CarriedWeight) -> BlockFormat:
    blocks = carried.blocks
    return BlockFormat(bits=blocks.bits, block_size=blocks.size, is_symmetric=not blocks.has_zero_points)


def _middle_levels(graph: ir.Graph, scales: ir.Value, chosen: BlockFormat) -> ir.Value:
    """Zero points of a symmetric embedding, spelt out: what their absence means differs between providers.

    ONNX Runtime's CPU provider then takes the middle level, its CUDA provider has taken 0 (onnxruntime issue 31692).
    """
    assert scales.shape is not None  # `_pack` has given it
    num_rows, num_blocks = scales.shape.numpy()
    shape = (num_rows, -(-num_blocks * chosen.bits // 8))
    middle = 0x88 if chosen.bits == 4 else 0x80
    name = f"{scales.name}.zero_points"
    tensor = LazyWeight(name, ir.DataType.UINT8, shape, lambda: iter((np.full(shape, middle, np.uint8),)))
    return add_tensor(graph, name, tensor)


def _block_sizes(chosen: BlockFormat) -> dict[str, int]:
    return {"bits": chosen.bits, "block_size": chosen.block_size}


def _replace(
    graph: ir.Graph, node: ir.Node, operator: str, inputs: list[ir.Value | None], sizes: dict[str, int]
) -> None:
    attributes = [ir.AttrInt64(name, size) for name, size in sizes.items()]
    packed = ir.Node(_CONTRIB, operator, inputs, attributes, name=node.name)
    graph.insert_before(node, packed)
    take_over(node.outputs[0], packed.outputs[0])
    graph.remove(node, safe=True)


def _is_by_output(node: ir.Node) -> bool:
    """Say whether this product's weight lies as `[N, K]`."""
    return node.op_type == "Gemm" and "transB" in node.attributes and node.attributes["transB"].as_int() == 1


def scaled_columns(weight: LazyWeight, scaling: InputScaling) -> LazyWeight:
    """A weight `[N, K]` for rows that are scaled, and rotated where they are."""
    scaled = weight if scaling.factors is None else weight.times_columns(scaling.factors, " scaled")
    return scaled.rotated() if scaling.is_rotated else scaled


def _weight_of(node: ir.Node) -> ir.Value | None:
    """The constant matrix of a MatMul or Gemm `[K, N]`, or of a Gemm with transB `[N, K]`."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    return weight


def _embedding_of(node: ir.Node) -> ir.Value | None:
    """The constant table `[V, H]` that the ids of a text are looked up in."""
    if node.op_type != "Gather":
        return None
    table, ids = node.inputs[:2]
    if table is None or table.const_value is None or ids is None or ids.name not in (names.INPUT_IDS, names.DRAFT_IDS):
        return None
    return table
