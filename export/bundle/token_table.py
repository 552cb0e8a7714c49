"""Where a written target keeps its token embedding: for the host, which looks tokens up for a draft that shares it.

Owns: finding the table in the first stage's graph. Does not own: its rows (`graphs/token_rows.py`).
"""

from pathlib import Path
from typing import Any

import onnx_ir as ir

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import TargetEntry, TokenTable

_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def find_table(bundle: Path, target: TargetEntry) -> TokenTable:
    """Say where the embedding of a target that is written lies.

    Raises:
        ExportError: its first stage has none in the weights file.
    """
    graph = ir.load(bundle / target.segments[0].file).graph
    look_ups = [node for node in graph if _is_look_up(node) and _is_by_ids(node)]
    if len(look_ups) != 1:
        raise ExportError(
            f"the target's first stage looks tokens up {len(look_ups)} times, not once: the draft cannot share its "
            "embedding; train one with an embedding of its own"
        )
    (node,) = look_ups
    rows = _external(node, 0)
    if node.op_type == "Gather":
        num_rows, width = rows.shape.numpy()
        if rows.dtype == ir.DataType.INT8:
            return _by_row(node, target)
        dtype = _DTYPES[rows.dtype]
        return TokenTable(
            file=target.weights_file, num_rows=num_rows, width=width, dtype=dtype, offset=rows.offset or 0
        )
    scales = _external(node, 2)
    return TokenTable(
        file=target.weights_file,
        num_rows=rows.shape.numpy()[0],
        width=target.shape.hidden_size,
        dtype=_DTYPES[scales.dtype],
        offset=rows.offset or 0,
        bits=node.attributes["bits"].as_int(),
        block_size=node.attributes["block_size"].as_int(),
        scales_offset=scales.offset or 0,
    )


def _by_row(look_up: ir.Node, target: TargetEntry) -> TokenTable:
    """The table that an integer head shares with the embedding (`integer_products.py`)."""
    rows = _external(look_up, 0)
    by_name = {node.name: node for node in look_up.graph or ()}
    scales, unscaled = _external(by_name[_sibling(look_up, "_scales")], 0), by_name[_sibling(look_up, "_unscaled")]
    num_rows, width = rows.shape.numpy()
    return TokenTable(
        file=target.weights_file,
        num_rows=num_rows,
        width=width,
        dtype="float32",
        offset=rows.offset or 0,
        bits=8,
        block_size=width,
        scales_offset=scales.offset or 0,
        factors_offset=_external(unscaled, 1).offset or 0,
    )


def _sibling(look_up: ir.Node, ending: str) -> str:
    return f"{(look_up.name or '').removesuffix('_levels')}{ending}"


def _is_look_up(node: ir.Node) -> bool:
    table = node.inputs[0] if node.op_type in ("Gather", "GatherBlockQuantized") else None
    return table is not None and table.shape is not None and len(table.shape) == 2


def _is_by_ids(node: ir.Node) -> bool:
    """Whether a look-up's index is made of the text's ids, and of nothing else."""
    value = node.inputs[1]
    while value is not None and (made_by := value.producer()) is not None:
        value = made_by.inputs[0]
    return value is not None and value.name == names.INPUT_IDS


def _external(node: ir.Node, number: int) -> Any:
    value = node.inputs[number]
    tensor = None if value is None else value.const_value
    if not isinstance(tensor, ir.ExternalTensor):
        raise ExportError("the target's embedding lies outside its weights file: export it with another precision")
    return tensor
