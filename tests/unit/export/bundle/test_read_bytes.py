"""What a stage reads of its weights."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mirrorsd.export.bundle.read_bytes import read_bytes


@pytest.mark.parametrize(("times", "expected"), [(1, 4 * 8 * 8), (3, 3 * 4 * 8 * 8)])
def test_a_matrix_counts_each_time_that_it_is_read_and_a_table_never(tmp_path: Path, times: int, expected: int) -> None:
    rows = ir.val("rows", ir.DataType.FLOAT, [1, 8])
    token = ir.val("token", ir.DataType.INT64, [1])
    matrix, table = (
        ir.Value(name=name, const_value=ir.tensor(np.zeros(size, np.float32), name=name))
        for name, size in (("matrix", (8, 8)), ("table", (100, 8)))
    )
    nodes = [ir.node("Gather", [table, token])]
    value = rows
    for _ in range(times):
        nodes.append(ir.node("MatMul", [value, matrix]))
        value = nodes[-1].outputs[0]
    graph = ir.Graph([rows, token], [value], nodes=nodes, initializers=[matrix, table], opset_imports={"": 21})
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "stage.onnx")
    assert read_bytes(tmp_path / "stage.onnx") == expected
