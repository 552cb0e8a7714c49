import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mirrorsd.export.passes.projection import JoinProjections
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.export.weights.lazy_weight import LazyWeight

GATED = """
<ir_version: 10, opset_import: ["" : 23]>
gated (float[1,S,4] x) => (float[1,S,6] gate, float[1,S,2] up, float[1,S,3] other, float[1,S,2] biased)
<float[4,6] gate_weight = {0}, float[4,2] up_weight = {0}, float[4,3] alone = {0}, float[4,2] with_bias = {0},
 float[2] bias = {0}>
{
    gate = MatMul(x, gate_weight)
    up = MatMul(x, up_weight)
    product = MatMul(x, with_bias)
    biased = Add(bias, product)
    turned = Neg(x)
    other = MatMul(turned, alone)
}
"""

ATTENTION = """
<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
attention (float[1,S,4] x, float[1,1,C,8] past_key, float[1,1,C,8] past_value, int32[1] seqlens_k, int32 total)
    => (float[1,S,16] attended, float[1,1,C,8] present_key, float[1,1,C,8] present_value)
<float[4,16] q_weight = {0}, float[4,8] k_weight = {0}, float[4,8] v_weight = {0},
 float[16] q_bias = {0}, float[8] k_bias = {0}, float[8] v_bias = {0}>
{
    q_rows = MatMul(x, q_weight)
    q = Add(q_rows, q_bias)
    k_rows = MatMul(x, k_weight)
    k = Add(k_rows, k_bias)
    v_rows = MatMul(x, v_weight)
    v = Add(v_rows, v_bias)
    attended, present_key, present_value = com.microsoft.GroupQueryAttention
        <num_heads = 2, kv_num_heads = 1, scale = 0.35> (q, k, v, past_key, past_value, seqlens_k, total)
}
"""


def model_of(text: str) -> ir.Model:
    """Random weights in place of the text's zeros."""
    rng = np.random.default_rng(3)
    model = ir.from_onnx_text(text)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        shape = value.shape.numpy() if value.shape is not None else ()
        value.const_value = ir.tensor(rng.standard_normal(shape, dtype=np.float32), name=value.name)
    return model


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def op_types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_projections_of_the_same_rows_become_one_product() -> None:
    feeds = {"x": np.random.default_rng(4).standard_normal((1, 3, 4), dtype=np.float32)}
    expected = run(model_of(GATED), feeds)
    joined = JoinProjections()(model_of(GATED)).model
    assert op_types(joined) == ["MatMul", "Split", "MatMul", "Add", "Neg", "MatMul"]
    assert [value.name for value in joined.graph.outputs] == ["gate", "up", "other", "biased"]
    for found, wanted in zip(run(joined, feeds), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("is_biased", [True, False])
def test_attention_reads_query_key_and_value_from_one_product(is_biased: bool) -> None:
    text = ATTENTION
    if not is_biased:
        for name in "qkv":
            text = text.replace(f"{name} = Add({name}_rows, {name}_bias)", "").replace(f"{name}_rows = ", f"{name} = ")
    rng = np.random.default_rng(5)
    feeds = {name: rng.standard_normal((1, 1, 16, 8), dtype=np.float32) for name in ("past_key", "past_value")}
    feeds |= {"x": rng.standard_normal((1, 3, 4), dtype=np.float32)}
    feeds |= {"seqlens_k": np.array([7], np.int32), "total": np.array(8, np.int32)}
    expected = run(model_of(text), feeds)
    joined = JoinProjections()(model_of(text)).model
    assert op_types(joined) == ["MatMul", *(["Add"] if is_biased else []), "GroupQueryAttention"]
    for found, wanted in zip(run(joined, feeds), expected, strict=True):
        np.testing.assert_allclose(found[:, :, :8], wanted[:, :, :8], atol=1e-5)


def test_attention_that_shares_a_key_with_others_gets_its_parts_from_a_split() -> None:
    text = ATTENTION.replace("=> (", "=> (float[1,S,8] key_too, ").replace("v_rows =", "key_too = Neg(k)\n    v_rows =")
    joined = JoinProjections()(model_of(text)).model
    assert op_types(joined) == ["MatMul", "Add", "Split", "Neg", "GroupQueryAttention"]


def test_a_group_that_is_left_breaks_the_promise() -> None:
    with pytest.raises(ir.passes.PostconditionError, match="two products of the same rows are left"):
        JoinProjections().ensures(model_of(GATED))


def test_weights_of_another_form_are_not_joined() -> None:
    """A router that stays float beside products in 8 bits."""
    model = model_of(GATED)
    for name in ("gate_weight", "up_weight"):
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy()
        value.const_value = LazyWeight(name, ir.DataType.FLOAT, array.shape, lambda array=array: iter((array,)))
    formats = WeightFormats(layers=BlockChoice(bits=8), floats=frozenset({"gate_weight"}))
    assert op_types(JoinProjections(formats)(model).model).count("MatMul") == op_types(model_of(GATED)).count("MatMul")
