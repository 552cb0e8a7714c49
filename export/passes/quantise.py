"""Weights as blocks of integers: products become `MatMulNBits`, the embedding becomes `GatherBlockQuantized`.

Owns: which weights of a graph are packed, and the nodes that read them. Does not own: the formats (`block_formats.py`),
the packing itself (`block_quantisation.py`, `aware_quantisation.py`), undoing it (`rounded_weights.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_constant, add_tensor, take_over
from mirrorsd.export.weights.block_formats import BlockChoice, BlockFormat, WeightFormats
from mirrorsd.export.weights.block_quantisation import pack_levels, quantise_rows
from mirrorsd.export.weights.gguf_tensors import BLOCK, CarriedWeight
from mirrorsd.export.weights.lazy_weight import LazyWeight, Pack, first_name, lazy_weight, pack_rows
from mirrorsd.graphs import names

Array = npt.NDArray[Any]
ChoosePack = Callable[[str, BlockFormat], tuple[str, Pack]]

_INT8_ACTIVATIONS = 4
_CONTRIB = "com.microsoft"
_OF_FILE = "of the file"
_OFFSETS = f"{_OF_FILE}.offsets"


def round_to_nearest(key: str, chosen: BlockFormat) -> tuple[str, Pack]:
    """Give the recipe's name and the packing of the weight `key`, whatever it is."""
    return chosen.recipe, partial(quantise_rows, chosen=chosen)


class QuantiseWeights(ir.passes.InPlacePass):
    """Pack the constant weights of products and of the token embedding in their formats; None leaves them as they are.

    The embedding's format is symmetric.

    The head is the `Gemm` with transB that is `head_width` wide; the embedding is what `input_ids` gathers from. Where
    a stage looks up what it has chosen itself, every table of `head_width` rows is one: in a drafting head, and for the
    best tokens of a scan. Equal weights in equal formats give equal tensors, so a tied embedding and head stay one.
    Weights that the formats carry from a file keep its blocks. Products with `lent` weights, by name, have the format
    given there: a drafting head's layers that are its target's own are packed as the target's, and so stay one.
    Ensures: no float matrix product with constant weights is left, but for a head without a format and for what a
    file's blocks are offset by.
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
        packed = [self._pack_node(model.graph, node) for node in list(model.graph)]
        if any(packed):
            model.opset_imports[_CONTRIB] = 1
        return ir.passes.PassResult(model, modified=any(packed))

    def ensures(self, model: ir.Model) -> None:
        """Check that nothing was overlooked."""
        left = [node for node in model.graph if _weight_of(node) is not None]
        if self._formats.layers is not None and any(self._product_format(node) is not None for node in left):
            raise ir.passes.PostconditionError("a matrix product with float weights is left")

    def _pack_node(self, graph: ir.Graph, node: ir.Node) -> bool:
        table = _embedding_of(node) or self._table_of(graph, node)
        if table is not None and self._formats.embedding is not None:
            self._replace_gather(graph, node, table, self._formats.embedding)
            return True
        weight = _weight_of(node)
        chosen = None if weight is None else self._product_format(node)
        if weight is None or chosen is None:
            return False
        self._replace_product(graph, node, weight, chosen)
        return True

    def _table_of(self, graph: ir.Graph, node: ir.Node) -> ir.Value | None:
        """The constant table in which a drafting head looks tokens up, or a scan its best ones."""
        if node.op_type != "Gather":
            return None
        ids = node.inputs[1]
        is_of_scan = ids is not None and (made_by := ids.producer()) is not None and made_by.op_type == "TopK"
        is_of_head = any(value.name == names.HEAD_TOKENS for value in graph.inputs)
        table = node.inputs[0] if is_of_head or is_of_scan else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            return None
        is_by_row = node.attributes.get_int("axis", 0) == 0
        return table if is_by_row and table.const_value.shape[0] == self._head_width else None

    def _product_format(self, node: ir.Node) -> BlockChoice | None:
        weight = node.inputs[1]
        assert weight is not None and weight.const_value is not None  # `_weight_of` has looked
        is_head = _is_by_output(node) and weight.const_value.shape[0] == self._head_width
        if not isinstance(weight.const_value, LazyWeight):
            return self._formats.of_head if is_head else self._formats.layers
        key = weight.const_value.key
        if key.endswith(_OFFSETS):
            return None
        name = first_name(key)
        if name in self._lent:
            return self._lent[name]
        return self._formats.of_head if is_head else self._formats.of_layer(name)

    def _replace_product(self, graph: ir.Graph, node: ir.Node, weight: ir.Value, asked: BlockChoice) -> None:
        assert weight.const_value is not None  # `_weight_of` has looked
        source = lazy_weight(weight.const_value)
        by_output = source if _is_by_output(node) else source.transposed()
        num_rows, width = (int(size) for size in by_output.shape.numpy())
        carried = self._carried(by_output)
        chosen = asked.for_width(width) if carried is None else BlockFormat(bits=carried.bits, block_size=BLOCK)
        parts = self._pack(graph, by_output, chosen, carried, is_gather=False)
        inputs: list[ir.Value | None] = [node.inputs[0], *parts]
        if len(node.inputs) > 2:
            inputs += [None] * (5 - len(inputs)) + [node.inputs[2]]
        sizes = {"K": width, "N": num_rows, "accuracy_level": _INT8_ACTIVATIONS}
        if carried is not None and carried.has_offsets:
            _add_offsets(graph, node, by_output.key, carried)
        _replace(graph, node, "MatMulNBits", inputs, sizes | _block_sizes(chosen))

    def _carried(self, source: LazyWeight) -> CarriedWeight | None:
        return None if self._formats.carried is None else self._formats.carried.of(source.key)

    def _replace_gather(self, graph: ir.Graph, node: ir.Node, table: ir.Value, asked: BlockChoice) -> None:
        assert table.const_value is not None  # `_embedding_of` has looked
        source = lazy_weight(table.const_value)
        carried = self._carried(source)
        if carried is not None and carried.has_offsets:  # looking up knows of no offsets that are floats
            carried = None
        chosen = (
            asked.for_width(int(source.shape.numpy()[1]))
            if carried is None
            else BlockFormat(bits=carried.bits, block_size=BLOCK)
        )
        data, scales = self._pack(graph, source, chosen, carried, is_gather=True)
        inputs = [data, node.inputs[1], scales, _middle_levels(graph, scales, chosen)]
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
    ) -> list[ir.Value]:
        """Add the packed tensors of `source` `[N, K]`; the embedding reads the same bytes in two dimensions."""
        compute = source.dtype.numpy()
        num_rows, width = (int(size) for size in source.shape.numpy())
        num_blocks = -(-width // chosen.block_size)
        block_bytes = chosen.block_size * chosen.bits // 8
        data = (num_rows, num_blocks * block_bytes) if is_gather else (num_rows, num_blocks, block_bytes)
        scales = (num_rows, num_blocks) if is_gather else (num_rows * num_blocks,)
        zero_bytes = -(-num_blocks * chosen.bits // 8)
        zero_points = (num_rows, zero_bytes) if is_gather else (num_rows * zero_bytes,)
        shapes = (data, scales) if chosen.is_symmetric else (data, scales, zero_points)
        if carried is None:
            recipe, pack = self._choose_pack(source.key, chosen)
            packed = pack_rows(source, recipe, partial(pack_as, pack, compute), shapes)
        else:
            recipe = _OF_FILE
            packed = [_carried_part(source.key, carried, *part) for part in enumerate(shapes)]
        kind = "rows" if is_gather else "weights"
        return [add_tensor(graph, f"{source.key}.{recipe}.{kind}{number}", part) for number, part in enumerate(packed)]


def pack_as(pack: Pack, compute: np.dtype[Any], rows: Array) -> tuple[Array, ...]:
    """Pack `rows`, with scales of the kind that the stages compute in."""
    data, scales, *zero_points = pack(rows.astype(np.float32))
    return (data, scales.astype(compute), *zero_points)


def _carried_part(key: str, carried: CarriedWeight, number: int, shape: tuple[int, ...]) -> LazyWeight:
    """Levels (0) or scales (1) of a carried weight, in `shape`."""

    def chunks() -> Iterator[Array]:
        levels, scales, *_ = carried.parts()
        yield pack_levels(levels, scales, None, carried.bits)[number]

    dtype = ir.DataType.FLOAT if number else ir.DataType.UINT8
    return LazyWeight(f"{key} {_OF_FILE}.{number}", dtype, shape, chunks)


def _add_offsets(graph: ir.Graph, node: ir.Node, key: str, carried: CarriedWeight) -> None:
    """Add to a product what its blocks' offsets make: the sum of the inputs of a block, times its offset.

    `MatMulNBits` takes zero points that are floats too, but then turns the whole weight into floats in every pass.
    """
    rows, result = node.inputs[0], node.outputs[0]
    if rows is None or rows.shape is None:
        raise ir.passes.PreconditionError(f"the rank of what {node.name!r} multiplies is not known")
    num_rows, num_blocks = carried.shape[0], carried.shape[1] // BLOCK
    by_block = np.array([0] * (len(rows.shape) - 1) + [num_blocks, BLOCK], np.int64)
    shape = add_constant(graph, f"blocks_of_rows.{'.'.join(map(str, by_block))}", by_block)
    last = add_constant(graph, "last_axis", np.array([-1], np.int64))

    def chunks() -> Iterator[Array]:
        yield np.ascontiguousarray(carried.parts()[2].T)

    offsets = LazyWeight(f"{key} {_OFFSETS}", ir.DataType.FLOAT, (num_blocks, num_rows), chunks)
    weight = add_tensor(graph, offsets.key, offsets)
    split = ir.Node("", "Reshape", [rows, shape], name=f"{node.name}_blocks")
    sums = ir.Node("", "ReduceSum", [split.outputs[0], last], [ir.AttrInt64("keepdims", 0)], name=f"{node.name}_sums")
    added = ir.Node("", "MatMul", [sums.outputs[0], weight], name=f"{node.name}_offsets")
    whole = ir.Node("", "Add", [added.outputs[0], added.outputs[0]], name=f"{node.name}_with_offsets")
    graph.insert_after(node, [split, sums, added, whole])
    take_over(result, whole.outputs[0])
    result.name, result.type = f"{node.name}_levels", whole.outputs[0].type
    whole.replace_input_with(0, result)


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
    if table is None or table.const_value is None or ids is None or ids.name != names.INPUT_IDS:
        return None
    return table
