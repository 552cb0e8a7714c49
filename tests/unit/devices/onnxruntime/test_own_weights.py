"""Products that read one weight get names of their own for it, and say what they said before."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from mirrorsd.devices.onnxruntime.own_weights import with_own_weights
from mirrorsd.graphs import names

SIZES = 64, 32


def graph(num_products: int) -> bytes:
    """Products of rows of their own and one weight."""
    rng = np.random.default_rng(3)
    values: dict[str, np.ndarray[Any, Any]] = {
        "scale": np.array(0.5, np.float32),
        "middle": np.array(128, np.uint8),
        "weight": rng.integers(-127, 128, SIZES[::-1], np.int8),
        "scales": np.ones(SIZES[1], np.float32),
        "zeros": np.zeros(SIZES[1], np.int8),
    }
    nodes = [
        helper.make_node(
            "QGemm",
            [f"rows{number}", "scale", "middle", "weight", "scales", "zeros"],
            [f"out{number}"],
            domain="com.microsoft",
            transB=1,
        )
        for number in range(num_products)
    ]
    ports = [helper.make_tensor_value_info(f"rows{n}", TensorProto.UINT8, [2, SIZES[0]]) for n in range(num_products)]
    outs = [helper.make_tensor_value_info(f"out{n}", TensorProto.FLOAT, [2, SIZES[1]]) for n in range(num_products)]
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(helper.make_graph(nodes, "g", ports, outs, tensors), opset_imports=opsets, ir_version=10)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize("is_asked_for_precision", [True, False])
def test_each_product_says_what_it_said(*, is_asked_for_precision: bool) -> None:
    model = with_own_weights(graph(3))
    assert model is not None
    options = ort.SessionOptions()
    if is_asked_for_precision:  # so that processors without VNNI refuse the graph as it was
        options.add_session_config_entry(*names.EXACT_INTEGERS)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(5).integers(0, 128, (3, 2, SIZES[0]), np.uint8)
    found = session.run(None, {f"rows{number}": rows[number] for number in range(3)})
    single = ort.InferenceSession(graph(1), options, providers=["CPUExecutionProvider"])
    for number in range(3):
        np.testing.assert_array_equal(found[number], single.run(None, {"rows0": rows[number]})[0])


def test_a_graph_that_shares_nothing_stays_its_file() -> None:
    assert with_own_weights(graph(1)) is None


def test_what_is_no_graph_is_said() -> None:
    with pytest.raises(ValueError, match="field"):
        with_own_weights(b"\x07")
