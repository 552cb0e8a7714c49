import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mirrorsd.export.quantise_pass import QuantiseWeights, quantise_blocks

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
stage (float[R,48] x) => (float[R,40] y) <float[1,1] w = {0}, float[1,1] gemm = {0}, float[1,1] head = {0}>
{ g = MatMul(x, w) h = Gemm(g, gemm) y = Gemm <transB = 1> (h, head) }
"""


def test_the_example_of_the_docstring() -> None:
    packed, scales = quantise_blocks(np.array([[0.7, -0.32]], np.float32), 4, 32)
    assert scales[0, 0] == pytest.approx(0.1)
    assert packed[0, 0, 0] == 15 | (5 << 4)
    assert packed[0, 0, 1] == 8 | (8 << 4)


def test_blocks_of_zeros_stay_zero() -> None:
    packed, scales = quantise_blocks(np.zeros((2, 64), np.float32), 8, 32)
    assert (packed == 128).all()
    assert (scales == 1.0).all()


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.02), (4, 0.2)])
def test_a_quantised_stage_computes_nearly_the_same(bits: int, largest: float) -> None:
    rng = np.random.default_rng(1)
    """A Gemm in the middle counts as a layer, with or without transB; only the head keeps 8 bits."""
    model = ir.from_onnx_text(GRAPH)
    weights = {
        "w": rng.standard_normal((48, 64), dtype=np.float32),
        "gemm": rng.standard_normal((64, 64), dtype=np.float32),
        "head": rng.standard_normal((40, 64), dtype=np.float32),
    }
    for name, array in weights.items():
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    quantised = QuantiseWeights(bits, head_width=40)(model).model
    assert [node.op_type for node in quantised.graph] == ["MatMulNBits"] * 3
    assert [node.attributes["bits"].as_int() for node in quantised.graph] == [bits, bits, 8]
    rows = rng.standard_normal((5, 48), dtype=np.float32)
    session = ort.InferenceSession(ir.to_proto(quantised).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = rows @ weights["w"] @ weights["gemm"] @ weights["head"].T
    assert np.abs(session.run(None, {"x": rows})[0] - expected).max() / np.abs(expected).max() < largest
