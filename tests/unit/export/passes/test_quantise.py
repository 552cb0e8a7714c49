from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.export.weights.lazy_weight import LazyWeight

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
stage (int64[1,R] input_ids) => (float[R,40] y)
<float[1,1] table = {0}, float[1,1] w = {0}, float[1,1] gemm = {0}, float[1,1] head = {0}, float[64] bias = {0}>
{ x = Gather(table, input_ids) a = MatMul(x, w) f = Squeeze(a) g = Gemm(f, gemm, bias)
  h = Gemm <transB = 1> (g, head) y = Identity(h) }
"""
INT8 = BlockChoice(bits=8, block_size=32)


def make_stage(rng: np.random.Generator, *, is_tied: bool = False) -> tuple[ir.Model, dict[str, Any]]:
    """An embedding, a product, a Gemm with a bias in the middle, and a head."""
    model = ir.from_onnx_text(GRAPH)
    shapes = {"table": (40, 64), "w": (64, 64), "gemm": (64, 64), "head": (40, 64), "bias": (64,)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    if is_tied:
        weights["head"] = weights["table"]
    for name, array in weights.items():
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    return model, weights


def packed_with(model: ir.Model, formats: WeightFormats) -> ir.Model:
    return QuantiseWeights(formats, head_width=40)(model).model


@pytest.mark.parametrize(("bits", "largest"), [(8, 0.03), (4, 0.25)])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_a_packed_stage_computes_nearly_the_same(
    bits: int, largest: float, is_symmetric: bool, block_size: int
) -> None:
    """A Gemm in the middle counts as a layer and keeps its bias; only the head and the embedding keep 8 bits."""
    rng = np.random.default_rng(1)
    model, weights = make_stage(rng)
    layers = BlockChoice(bits=bits, block_size=block_size, is_symmetric=is_symmetric)
    model = packed_with(model, WeightFormats(layers=layers, head=INT8, embedding=INT8))
    nodes = {node.op_type: node for node in model.graph}
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert [node.attributes["bits"].as_int() for node in products] == [bits, bits, 8]
    gather = nodes["GatherBlockQuantized"]
    assert gather.attributes["bits"].as_int() == 8
    assert gather.inputs[3] is not None, "without zero points providers differ"
    assert gather.inputs[3].const_value.numpy().tolist() == [[128, 128]] * 40
    ids = np.array([[3, 0, 39, 3]])
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    hidden = weights["table"][ids[0]] @ weights["w"] @ weights["gemm"] + weights["bias"]
    expected = hidden @ weights["head"].T
    assert np.abs(session.run(None, {"input_ids": ids})[0] - expected).max() / np.abs(expected).max() < largest


def test_what_has_no_format_stays_float() -> None:
    model, _ = make_stage(np.random.default_rng(2))
    model = packed_with(model, WeightFormats(layers=INT8))
    assert [node.op_type for node in model.graph] == [
        "Gather",
        "MatMulNBits",
        "Squeeze",
        "MatMulNBits",
        "Gemm",
        "Identity",
    ]
    model, _ = make_stage(np.random.default_rng(2))
    assert not QuantiseWeights(WeightFormats(), head_width=40)(model).modified


def test_a_layer_s_product_is_no_head_though_it_is_as_wide() -> None:
    """Of rows without a batch, as of experts and of OPT, products are written as the head is."""
    for name, bits in (("layers.1.node_linear", [4, 4, 4]), ("node_linear", [4, 4, 8])):
        model, _ = make_stage(np.random.default_rng(2))
        next(node for node in model.graph if "transB" in node.attributes).name = name
        packed = packed_with(model, WeightFormats(layers=BlockChoice(bits=4), head=INT8))
        found = [node.attributes["bits"].as_int() for node in packed.graph if node.op_type == "MatMulNBits"]
        assert found == bits


def test_a_tied_matrix_stays_one() -> None:
    """Embedding and head read the same bytes in other shapes; the weights file knows them by their keys."""
    model, _ = make_stage(np.random.default_rng(4), is_tied=True)
    model = packed_with(model, WeightFormats(layers=BlockChoice(bits=4), head=INT8, embedding=INT8))
    by_operator = {node.op_type: node for node in model.graph}
    gather, head = by_operator["GatherBlockQuantized"], list(model.graph)[-2]
    pairs = [(gather.inputs[0], head.inputs[1]), (gather.inputs[2], head.inputs[2])]
    for one, other in pairs:
        tensors = [value.const_value for value in (one, other) if value is not None]
        assert all(isinstance(tensor, LazyWeight) for tensor in tensors)
        assert tensors[0].key == tensors[1].key  # type: ignore[union-attr]
        assert tensors[0].tobytes() == tensors[1].tobytes()  # type: ignore[union-attr]


def test_weights_that_were_lent_have_the_format_of_their_lender() -> None:
    """Joined and turned weights go by the name that they begin with."""
    model, weights = make_stage(np.random.default_rng(2))
    for name, key in (("w", "a.weight below b.weight"), ("gemm", "own.weight")):
        matrix = LazyWeight(key, ir.DataType.FLOAT, (64, 64), lambda array=weights[name]: iter((array.T.copy(),)))
        model.graph.initializers[name].const_value = matrix.transposed()
    lent = {"a.weight": BlockChoice(bits=4, block_size=32)}
    formats = WeightFormats(layers=INT8, head=INT8, embedding=INT8)
    packed = QuantiseWeights(formats, head_width=40, lent=lent)(model).model
    products = [node for node in packed.graph if node.op_type == "MatMulNBits"]
    assert [node.attributes["bits"].as_int() for node in products] == [4, 8, 8]
