"""bfloat16 graphs as float32 ones on the CPU: weights rounded to bfloat16, everything else in float32."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mirrorsd.export.passes.upcast import float32_copies

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
stage (bfloat16[R,32] x) => (float[R,8] y) <bfloat16[1] w = {0}, bfloat16[1] small = {0}>
{ a = MatMul(x, w) b = Add(a, small) c = Cast <to = 1> (b) d = Cast <to = 16> (c) y = Cast <to = 1> (d) }
"""


def test_a_copy_runs_where_bfloat16_does_not_and_reads_the_same_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((32, 8), np.float32).astype(ml_dtypes.bfloat16)
    model = ir.from_onnx_text(GRAPH)
    for name, array in (("w", weights), ("small", np.arange(1, 9).astype(ml_dtypes.bfloat16))):
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.Tensor(array, name=name), ir.Shape(array.shape)
    ir.save(model, tmp_path / "stage.onnx", external_data="weights.bin", size_threshold_bytes=100)
    rows = rng.standard_normal((3, 32), np.float32)
    with float32_copies(tmp_path, ["stage.onnx"]) as copies:
        session = ort.InferenceSession(str(tmp_path / copies["stage.onnx"]), providers=["CPUExecutionProvider"])
    expected = rows @ weights.astype(np.float32) + np.arange(1, 9)
    np.testing.assert_allclose(session.run(None, {"x": rows})[0], expected, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage.onnx", "weights.bin"]
