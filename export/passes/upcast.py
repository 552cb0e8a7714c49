"""The same graphs in float32 arithmetic: 16-bit floats are widened, products of integers take float32 rows.

Owns: copies of the graphs whose weights are cast, one by one and at every run, from the shared weights file. They prove
the graphs and the rounded weights, not the arithmetic of a precision; a bfloat16 target runs in no other way here, as
ONNX Runtime's CPU provider has no bfloat16 products. Does not own: running and comparing (`verify/target.py`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_tensor, take_over

_NARROW, _WIDE = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), ir.DataType.FLOAT
_FLOAT_ROWS = ir.AttrInt64("accuracy_level", 1)
_BLOCK, _MIDDLE = 128, 128
"""How `MatMulNBits` is to read levels by row: blocks of one row have the same scale, and 128 is zero."""


@contextmanager
def float32_copies(bundle: Path, files: Iterable[str]) -> Iterator[dict[str, str]]:
    """Write float32 copies of the graphs `files` beside them, which go with the block.

    They read the same weights, but for levels of integer products, which are written once more.

    Yields:
        The copies' bundle paths by those of the originals.
    """
    copies = {file: f"{file}.float32" for file in files}
    levels = {file: f"{copy}.levels" for file, copy in copies.items()}
    try:
        for file, copy in copies.items():
            with (bundle / levels[file]).open("wb") as stream:
                ir.save(_widened(ir.load(bundle / file), stream), bundle / copy)
        yield copies
    finally:
        for written in (*copies.values(), *levels.values()):
            (bundle / written).unlink(missing_ok=True)


def _widened(model: ir.Model, stream: BinaryIO) -> ir.Model:
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
            _take_floats(graph, node, stream)
            model.opset_imports[node.domain] = 1
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


def _take_floats(graph: ir.Graph, product: ir.Node, stream: BinaryIO) -> None:
    """Let a product of integers (`integer_products.py`) multiply the rows before they were rounded.

    Its levels go into `stream` once more, as blocks: floats of them would take four times their memory.
    """
    is_by_output = product.op_type == "QGemm"
    levels, scales = product.inputs[3 if is_by_output else 1], product.inputs[4 if is_by_output else 3]
    assert levels is not None and levels.const_value is not None
    assert scales is not None and scales.const_value is not None
    by_output = levels.const_value.numpy() if is_by_output else levels.const_value.numpy().T
    blocks, repeated = _as_blocks(by_output, scales.const_value.numpy())
    parts = [_written(graph, f"{product.name}.{name}", part, stream) for name, part in (("b", blocks), ("s", repeated))]
    num_rows, width = by_output.shape
    sizes = {"K": width, "N": num_rows, "bits": 8, "block_size": _BLOCK}
    attributes = [ir.AttrInt64(name, size) for name, size in sizes.items()]
    made = ir.Node("com.microsoft", "MatMulNBits", [_before_rounding(product), *parts], attributes)
    made.name = f"{product.name}_floats"
    graph.insert_before(product, [made])
    by_row = [use.node for use in product.outputs[0].uses() if use.node.name == f"{product.name}_by_row"]
    take_over((by_row or [product])[0].outputs[0], made.outputs[0])
    graph.remove([*by_row, product], safe=True)


def _as_blocks(
    levels: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Levels `[N, K]` and scales `[N]` as `[N, B, 128]`, padded with zeros, and `[N * B]`."""
    num_rows, width = levels.shape
    num_blocks = -(-width // _BLOCK)
    blocks = np.full((num_rows, num_blocks * _BLOCK), _MIDDLE, np.uint8)
    np.add(levels, _MIDDLE, out=blocks[:, :width], dtype=np.int16, casting="unsafe")
    return blocks.reshape(num_rows, num_blocks, _BLOCK), np.repeat(scales, num_blocks)


def _written(graph: ir.Graph, name: str, array: npt.NDArray[np.generic], stream: BinaryIO) -> ir.Value:
    """A tensor in the file of `stream`, as an initializer."""
    offset = stream.tell()
    array.tofile(stream)
    kind, place = ir.DataType.from_numpy(array.dtype), Path(stream.name)
    shape = ir.Shape(array.shape)
    tensor = ir.ExternalTensor(place.name, offset, array.nbytes, kind, shape=shape, name=name, base_dir=place.parent)
    return add_tensor(graph, name, tensor)


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
