"""The same graphs in float32 arithmetic: 16-bit floats are widened, products of integers take float32 rows.

Owns: copies of the graphs whose weights are cast, one by one and at every run, from the shared weights file. They prove
the graphs and the rounded weights, not the arithmetic of a precision; a bfloat16 target runs in no other way here, as
ONNX Runtime's CPU provider has no bfloat16 products. Does not own: running and comparing (`verify/target.py`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import take_over

_NARROW, _WIDE = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), ir.DataType.FLOAT
_FLOAT_ROWS = ir.AttrInt64("accuracy_level", 1)


@contextmanager
def float32_copies(bundle: Path, files: Iterable[str]) -> Iterator[dict[str, str]]:
    """Write float32 copies of the graphs `files`, which read the same weights, beside them; they go with the block.

    Yields:
        The copies' bundle paths by those of the originals.
    """
    copies = {file: f"{file}.float32" for file in files}
    try:
        for file, copy in copies.items():
            ir.save(_widened(ir.load(bundle / file)), bundle / copy)
        yield copies
    finally:
        for copy in copies.values():
            (bundle / copy).unlink(missing_ok=True)


def _widened(model: ir.Model) -> ir.Model:
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.dtype not in _NARROW:
            continue
        users = list(value.uses())
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", _WIDE)], name=f"{name}.float32")
        graph.insert_before(graph[0], cast)
        cast.outputs[0].name = f"{name}.float32"
        for user, index in users:
            user.replace_input_with(index, cast.outputs[0])
    for node in list(graph):
        if node.op_type in ("MatMulIntegerToFloat", "QGemm"):
            _take_floats(graph, node)
    for node in graph:
        is_widened = node.op_type == "Cast" and node.name and node.name.endswith(".float32")
        if node.op_type == "Cast" and not is_widened and node.attributes["to"].as_int() in _NARROW:
            node.attributes["to"] = ir.AttrInt64("to", _WIDE)
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = _FLOAT_ROWS
        for output in node.outputs:
            _widen(output)
    for value in graph.inputs:
        _widen(value)
    return model


def _take_floats(graph: ir.Graph, product: ir.Node) -> None:
    """Let a product of integers (`integer_products.py`) multiply the rows before they were rounded.

    Its weights are floats only while it runs: floats of all of them would take four times their memory. Levels are
    cast, and scales multiply what comes out: ONNX Runtime's DequantizeLinear takes eight times as long.
    """
    is_by_output = product.op_type == "QGemm"
    levels, scales = product.inputs[3 if is_by_output else 1], product.inputs[4 if is_by_output else 3]
    weights = ir.Node("", "Cast", [levels], [ir.AttrInt64("to", _WIDE)], name=f"{product.name}_weights")
    kind, how = ("Gemm", [ir.AttrInt64("transB", 1)]) if is_by_output else ("MatMul", [])
    bare = ir.Node("", kind, [_before_rounding(product), weights.outputs[0]], how, name=f"{product.name}_bare")
    made = ir.Node("", "Mul", [bare.outputs[0], scales], name=f"{product.name}_floats")
    weights.outputs[0].name, bare.outputs[0].name = weights.name, bare.name
    graph.insert_before(graph[0], weights)  # ONNX Runtime runs the first of a graph's free nodes last: when it must
    graph.insert_before(product, [bare, made])
    by_row = [use.node for use in product.outputs[0].uses() if use.node.name == f"{product.name}_by_row"]
    take_over((by_row or [product])[0].outputs[0], made.outputs[0])
    graph.remove([*by_row, product], safe=True)


def _before_rounding(product: ir.Node) -> ir.Value:
    rounded = product.inputs[0]
    rounding = None if rounded is None else rounded.producer()
    rows = None if rounding is None else rounding.inputs[0]
    assert rows is not None
    shares = rows.producer()
    if shares is not None and shares.name and shares.name.endswith("_shares"):
        rows = shares.inputs[0]
        assert rows is not None
    return rows


def _widen(value: ir.Value) -> None:
    if value.dtype in _NARROW:
        value.type = ir.TensorType(_WIDE)
