"""Reductions along a row of logits, made of operators that share the row out: the same places, the same sums."""

import numpy as np
import onnxruntime as ort
import pytest

from mirrorsd.devices.onnxruntime.onnx_bytes import model, node
from mirrorsd.devices.onnxruntime.row_reductions import with_shared_rows

ROWS = np.random.default_rng(7).standard_normal((1, 5, 300)).astype(np.float32) * 9
FLOATS, IDS = ("float32", 3), {3: ("int64", 3), 2: ("int64", 2)}


def run(graph: bytes) -> list[np.ndarray]:
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return session.run(None, {"logits": ROWS})


@pytest.mark.parametrize("keepdims", [0, 1])
def test_best_places_are_those_of_the_operator(keepdims: int) -> None:
    last = node("ArgMax", ["logits"], ["ids"], axis=-1, keepdims=keepdims)
    graph = model([last], [("logits", *FLOATS)], [("ids", *IDS[2 + keepdims])])
    made = with_shared_rows(graph)
    assert made is not None
    assert b"ArgMax" not in made
    assert np.array_equal(run(made)[0], run(graph)[0])


def test_sums_of_exponents_are_those_of_the_operator() -> None:
    constants = {"axis": np.array([-1])}
    whole = node("ReduceLogSumExp", ["logits", "axis"], ["mass"], keepdims=1)
    graph = model([whole], [("logits", *FLOATS)], [("mass", *FLOATS)], constants)
    made = with_shared_rows(graph)
    assert made is not None
    assert b"ReduceLogSumExp" not in made
    assert run(made)[0].shape == (1, 5, 1)
    assert np.allclose(run(made)[0], run(graph)[0], rtol=1e-6)


def test_both_in_one_stage() -> None:
    nodes = [
        node("ArgMax", ["logits"], ["ids"], axis=-1, keepdims=0),
        node("ReduceLogSumExp", ["logits", "axis"], ["mass"], keepdims=1),
    ]
    graph = model(nodes, [("logits", *FLOATS)], [("ids", *IDS[2]), ("mass", *FLOATS)], {"axis": np.array([-1])})
    made = with_shared_rows(graph)
    assert made is not None
    for found, expected in zip(run(made), run(graph), strict=True):
        assert np.allclose(found, expected, rtol=1e-6)


def test_along_another_axis_they_stay() -> None:
    nodes = [
        node("ArgMax", ["logits"], ["ids"], axis=1, keepdims=0),
        node("ReduceLogSumExp", ["logits", "axis"], ["mass"], keepdims=1),
    ]
    ports = [("ids", *IDS[2]), ("mass", *FLOATS)]
    assert with_shared_rows(model(nodes, [("logits", *FLOATS)], ports, {"axis": np.array([1])})) is None
