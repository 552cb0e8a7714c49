"""Products of integers compute what the float products did, to their rounding, and every row alike."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.upcast import float32_copies
from mirrorsd.export.weights.block_formats import BlockChoice, InputScaling, WeightFormats
from mirrorsd.export.weights.lazy_weight import LazyWeight
from mirrorsd.graphs import names

Array = npt.NDArray[Any]

WIDTH, WIDE, VOCABULARY = 48, 256, 40
FLOAT = ir.DataType.FLOAT


def tensor(name: str, *shape: int) -> LazyWeight:
    seed = sum(name.encode())
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return LazyWeight(name, FLOAT, shape, lambda: iter((array,)))


def value(graph: ir.Graph, weight: LazyWeight) -> ir.Value:
    made = ir.Value(
        name=weight.key, shape=ir.Shape(weight.shape.numpy()), type=ir.TensorType(weight.dtype), const_value=weight
    )
    graph.register_initializer(made)
    return made


def node(graph: ir.Graph, operator: str, inputs: list[ir.Value | None], width: int, **given: Any) -> ir.Value:
    attributes = [ir.AttrFloat32(k, v) if isinstance(v, float) else ir.AttrInt64(k, v) for k, v in given.items()]
    made = ir.Node("", operator, inputs, attributes, name=f"{operator}{len(graph)}")
    made.outputs[0].name, made.outputs[0].type = f"{made.name}.out", ir.TensorType(FLOAT)
    made.outputs[0].shape = ir.Shape((1, "S", width))
    graph.append(made)
    return made.outputs[0]


def layer(stage: str = "") -> ir.Model:
    """Look up, norm, gate and up as one product, down, head: the forms that a decoder has.

    The norm of a named `stage` is computed: it has numbers, which are those of all of them, and no name.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="layer")
    ids = ir.Value(name=names.INPUT_IDS, shape=ir.Shape((1, "S")), type=ir.TensorType(ir.DataType.INT64))
    graph.inputs.append(ids)
    embedding = value(graph, tensor("embedding", VOCABULARY, WIDTH))
    hidden = node(graph, "Gather", [embedding, ids], WIDTH)
    computed = ir.tensor(np.ones(WIDTH, np.float32), name="add_1")
    gamma = value_of(graph, computed) if stage else value(graph, tensor("gamma", WIDTH))
    normed = node(graph, "SimplifiedLayerNormalization", [hidden, gamma], WIDTH, axis=-1, epsilon=1e-5)
    joined = node(graph, "MatMul", [normed, value(graph, tensor(f"{stage}gate", WIDE, WIDTH * 1).transposed())], WIDE)
    sizes = ir.tensor(np.array([WIDE // 2, WIDE // 2], np.int64), name="sizes")
    split = ir.Node("", "Split", [joined, value_of(graph, sizes)], [ir.AttrInt64("axis", -1)], num_outputs=2)
    for number, output in enumerate(split.outputs):
        output.name, output.type = f"half{number}", ir.TensorType(FLOAT)
        output.shape = ir.Shape((1, "S", WIDE // 2))
    graph.append(split)
    gated = node(graph, "Mul", [node(graph, "Sigmoid", [split.outputs[0]], WIDE // 2), split.outputs[1]], WIDE // 2)
    down = node(graph, "MatMul", [gated, value(graph, tensor(f"{stage}down", WIDTH, WIDE // 2).transposed())], WIDTH)
    axis = value_of(graph, ir.tensor(np.array([0], np.int64), name="axis"))
    flat = node(graph, "Squeeze", [down, axis], WIDTH)
    flat.shape = ir.Shape(("S", WIDTH))
    logits = node(graph, "Gemm", [flat, embedding], VOCABULARY, transB=1)
    logits.shape = ir.Shape(("S", VOCABULARY))
    graph.outputs.append(logits)
    return ir.Model(graph, ir_version=10)


def value_of(graph: ir.Graph, constant: ir.TensorProtocol) -> ir.Value:
    made = ir.Value(
        name=constant.name, shape=ir.Shape(constant.shape.numpy()), type=ir.TensorType(constant.dtype),
        const_value=constant,
    )  # fmt: skip
    graph.register_initializer(made)
    return made


def factors(width: int) -> npt.NDArray[np.float32]:
    return np.linspace(0.5, 2, width, dtype=np.float32)


SCALED = {
    "gate": InputScaling(factors(WIDTH), largest=6.0),
    "down": InputScaling(factors(WIDE // 2)),
    "embedding": InputScaling(factors(WIDTH)),
}


def quantised(inputs: dict[str, InputScaling], stage: str = "") -> ir.Model:
    model = layer(stage)
    by_row = BlockChoice(bits=8, is_by_row=True)
    QuantiseWeights(WeightFormats(layers=by_row, head=by_row, embedding=by_row, inputs=inputs), VOCABULARY)(model)
    return model


def run(model: ir.Model | Path, ids: list[int]) -> Array:
    content = model if isinstance(model, Path) else ir.serde.serialize_model(model).SerializeToString()
    options = ort.SessionOptions()
    if not isinstance(model, Path):
        options.add_session_config_entry(*names.EXACT_INTEGERS)
    (found,) = ort.InferenceSession(content, options, ["CPUExecutionProvider"]).run(
        None, {names.INPUT_IDS: np.array([ids])}
    )
    return np.asarray(found)


ROTATED = SCALED | {"down": InputScaling(factors(WIDE // 2), is_rotated=True)}


@pytest.mark.parametrize("inputs", [{}, SCALED, ROTATED], ids=["as they are", "scaled", "rotated"])
def test_close_to_floats_and_every_row_has_the_same_bits(inputs: dict[str, InputScaling]) -> None:
    ids = [3, 17, 5, 39, 0, 21, 8]
    exact, found = run(layer(), ids), run(quantised(inputs), ids)
    assert np.abs(found - exact).std() < 0.03 * exact.std()
    for size in (1, 2, 3, 5):
        assert np.array_equal(run(quantised(inputs), ids[:size]), found[:size])


@pytest.mark.parametrize("inputs", [SCALED, ROTATED], ids=["scaled", "rotated"])
def test_its_float_twin_has_the_rounded_weights_alone(tmp_path: Path, inputs: dict[str, InputScaling]) -> None:
    """What is left between the twin and the floats is the weights' rounding: half of it at the most."""
    ids = [3, 17, 5, 39]
    exact, integer = run(layer(), ids), run(quantised(inputs), ids)
    ir.save(quantised(inputs), tmp_path / "stage.onnx")
    with float32_copies(tmp_path, ["stage.onnx"]) as copies:
        twin = run(tmp_path / copies["stage.onnx"], ids)
    assert 0 < np.abs(twin - exact).mean() < np.abs(integer - exact).mean()


def test_factors_are_divided_out_where_that_is_free() -> None:
    """In the norm before gate and up, in up's scales before down; the head's rows are divided by a node."""
    operators = [node.op_type for node in quantised(SCALED).graph]
    assert operators.count("QuantizeLinear") == 3 and operators.count("Abs") == 2, "one range behind the norm"
    scaled = [node.name for node in quantised(SCALED).graph if node.name and node.name.endswith("_scaled")]
    assert len(scaled) == 1


def test_weights_of_one_key_are_equal_in_all_stages() -> None:
    """Stages name their nodes alike, and norms of layers may be alike too: a bundle keeps what has one key once."""
    found: dict[str, list[Array]] = {}
    for stage, scaling in (("prefix.", factors(WIDTH)), ("suffix.", factors(WIDTH)[::-1])):
        model = quantised({f"{stage}gate": InputScaling(scaling, largest=6.0)}, stage)
        for held in model.graph.initializers.values():
            if isinstance(held.const_value, LazyWeight):
                found.setdefault(held.const_value.key, []).append(held.const_value.numpy())
    assert sum(" over " in key for key in found) == 2
    assert all(np.array_equal(first, more) for first, *others in found.values() for more in others)


def test_head_and_embedding_are_one_matrix() -> None:
    large = {
        name
        for name, found in quantised(SCALED).graph.initializers.items()
        if found.const_value is not None and found.const_value.dtype == ir.DataType.INT8 and "embedding" in name
    }
    assert len(large) == 1


def test_a_row_of_zeros_gives_zeros() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="one")
    rows = ir.Value(name="rows", shape=ir.Shape((1, "S", WIDTH)), type=ir.TensorType(FLOAT))
    graph.inputs.append(rows)
    graph.outputs.append(node(graph, "MatMul", [rows, value(graph, tensor("w", 8, WIDTH).transposed())], 8))
    model = ir.Model(graph, ir_version=10)
    QuantiseWeights(WeightFormats(layers=BlockChoice(bits=8, is_by_row=True)), VOCABULARY)(model)
    content = ir.serde.serialize_model(model).SerializeToString()
    given = np.zeros((1, 2, WIDTH), np.float32)
    given[0, 1] = 1
    (found,) = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"rows": given})
    assert not found[0, 0].any() and np.isfinite(found).all() and found[0, 1].any()


def test_products_of_one_size_share_nothing_that_becomes_unsigned() -> None:
    """ONNX Runtime names unsigned copies after what they are made from, and refuses a name that it has made before."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="experts")
    rows = ir.Value(name="rows", shape=ir.Shape(("S", WIDTH)), type=ir.TensorType(FLOAT))
    graph.inputs.append(rows)
    for name in ("gate", "up"):
        product = node(graph, "Gemm", [rows, value(graph, tensor(name, WIDE, WIDTH))], WIDE, transB=1)
        product.shape = ir.Shape(("S", WIDE))
        graph.outputs.append(product)
    model = ir.Model(graph, ir_version=10)
    QuantiseWeights(WeightFormats(layers=BlockChoice(bits=8, is_by_row=True)), VOCABULARY)(model)
    products = [made for made in model.graph if made.op_type == "QGemm"]
    assert len(products) == 2
    ours, theirs = ({one.name for one in product.inputs[3:6] if one} for product in products)
    assert not ours & theirs
    options = ort.SessionOptions()
    options.add_session_config_entry(*names.EXACT_INTEGERS)
    ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options, ["CPUExecutionProvider"])
