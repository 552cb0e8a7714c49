import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mirrorsd.export.passes.graph_passes import DropIdleReshapes, FuseSkipNorm
from mirrorsd.export.passes.rotary import FoldRotary
from mirrorsd.graphs.errors import ExportError

NORMS = """
<ir_version: 10, opset_import: ["" : 23]>
norms (float[1,S,4] a, float[1,S,4] b, float[4] weight) => (float[1,S,4] first, float[1,S,4] second, float[1,S,4] sum)
{
    first = RMSNormalization <axis: int = -1, epsilon: float = 1e-6, stash_type: int = 1> (a, weight)
    sum = Add(a, b)
    second = RMSNormalization <axis: int = -1, epsilon: float = 1e-6, stash_type: int = 1> (sum, weight)
}
"""

ROTATED = """
<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
rotated (float[1,S,16] q, float[1,S,16] k, float[1,S,16] v, int64[1,S] positions, float[1,1,C,16] past_key,
         float[1,1,C,16] past_value, int32[1] seqlens_k, int32 total)
    => (float[1,S,16] attended, float[1,1,C,16] present_key, float[1,1,C,16] present_value)
<int64[4] heads = {0, 0, 1, 16}, int64[3] flat = {0, 0, 16}, int64[1] one = {1}, int64[1] zero = {0},
 int64[1] half = {8}, int64[1] end = {16}, int64[1] last = {3}, float[1,2] cos = {0, 0}, float[1,2] sin = {0, 0}>
{
    q4 = Reshape(q, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    k4 = Reshape(k, heads)
    kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    cos_rows = Gather <axis = 0> (cos, positions)
    sin_rows = Gather <axis = 0> (sin, positions)
    cos4 = Unsqueeze(cos_rows, one)
    sin4 = Unsqueeze(sin_rows, one)
    q_straight = Mul(qt, cos4)
    q_lower = Slice(qt, zero, half, last, one)
    q_upper = Slice(qt, half, end, last, one)
    q_negated = Neg(q_upper)
    q_turned = Concat <axis = -1> (q_negated, q_lower)
    q_sine = Mul(q_turned, sin4)
    q_rotated = Add(q_straight, q_sine)
    q_back = Transpose <perm = [0, 2, 1, 3]> (q_rotated)
    q_flat = Reshape(q_back, flat)
    k_straight = Mul(kt, cos4)
    k_lower = Slice(kt, zero, half, last, one)
    k_upper = Slice(kt, half, end, last, one)
    k_negated = Neg(k_upper)
    k_turned = Concat <axis = -1> (k_negated, k_lower)
    k_sine = Mul(k_turned, sin4)
    k_rotated = Add(k_straight, k_sine)
    k_back = Transpose <perm = [0, 2, 1, 3]> (k_rotated)
    k_flat = Reshape(k_back, flat)
    attended, present_key, present_value = com.microsoft.GroupQueryAttention
        <num_heads = 1, kv_num_heads = 1, scale = 0.35, do_rotary = 0>
        (q_flat, k_flat, v, past_key, past_value, seqlens_k, total)
}
"""


def _model(text: str) -> ir.Model:
    return ir.from_onnx_text(text)


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_norms_are_fused_and_compute_the_same() -> None:
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((1, 3, 4), dtype=np.float32) for name in "ab"}
    feeds["weight"] = rng.standard_normal(4, dtype=np.float32)
    expected = _run(_model(NORMS), feeds)
    fused = FuseSkipNorm()(_model(NORMS)).model
    assert [node.op_type for node in fused.graph] == [
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    ]
    assert [value.name for value in fused.graph.outputs] == ["first", "second", "sum"]
    for found, wanted in zip(_run(fused, feeds), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_sum_of_unequal_shapes_is_not_fused() -> None:
    model = FuseSkipNorm()(_model(NORMS.replace("float[1,S,4] b", "float[4] b"))).model
    assert [node.op_type for node in model.graph] == [
        "SimplifiedLayerNormalization",
        "Add",
        "SimplifiedLayerNormalization",
    ]


def test_a_leftover_norm_breaks_the_promise() -> None:
    with pytest.raises(ir.passes.PostconditionError, match="an RMSNormalization is left"):
        FuseSkipNorm().ensures(_model(NORMS))


def test_idle_reshapes_are_bypassed() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 23]>
    idle (float[1,S,6] x) => (float[1,S,6] y)
    <int64[4] split = {0, 0, 2, 3}, int64[3] joined = {0, 0, 6}, float[1,S,2,3] four, float[1,S,6] three>
    {
        four = Reshape(x, split)
        three = Reshape(four, joined)
        y = Neg(three)
    }
    """
    model = DropIdleReshapes()(_model(text)).model
    negation = next(node for node in model.graph if node.op_type == "Neg")
    assert negation.inputs[0] is model.graph.inputs[0]


def _rotated(sin_halves: tuple[int, int] = (0, 0)) -> ir.Model:
    model = _model(ROTATED)
    angles = np.arange(16, dtype=np.float32)[:, None] * np.geomspace(1, 0.01, 8, dtype=np.float32)
    sines = np.concatenate([np.sin(angles + shift) for shift in sin_halves], axis=1)
    for name, table in (("cos", np.concatenate([np.cos(angles)] * 2, axis=1)), ("sin", sines)):
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(table, name=name), ir.Shape(table.shape)
    return model


def test_rotary_is_folded_and_computes_the_same() -> None:
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal((1, 3, 16), dtype=np.float32) for name in "qkv"}
    feeds |= {name: np.zeros((1, 1, 16, 16), np.float32) for name in ("past_key", "past_value")}
    feeds["past_key"][:, :, :5] = rng.standard_normal((1, 1, 5, 16))
    feeds["past_value"][:, :, :5] = rng.standard_normal((1, 1, 5, 16))
    feeds |= {"seqlens_k": np.array([7], np.int32), "total": np.array(8, np.int32)}
    feeds["positions"] = np.array([[5, 6, 7]])
    expected = _run(_rotated(), feeds)
    folded = FoldRotary()(_rotated()).model
    attention = folded.graph[-1]
    assert attention.attributes["do_rotary"].as_int() == 1
    assert [value.name for value in attention.inputs[:3]] == ["q", "k", "v"]
    assert [value.name for value in attention.inputs[7:]] == ["cos.half", "sin.half"]
    for found, wanted in zip(_run(folded, feeds), expected, strict=True):
        np.testing.assert_allclose(found[:, :, :8], wanted[:, :, :8], atol=1e-6)


def test_tables_with_two_different_halves_are_refused() -> None:
    with pytest.raises(ExportError, match="two different halves"):
        FoldRotary()(_rotated((0, 1)))


def test_attention_without_rotary_is_left_alone() -> None:
    model = _model(ROTATED.replace("(q_flat, k_flat, v,", "(q, k, v,"))
    assert not FoldRotary()(model).modified
