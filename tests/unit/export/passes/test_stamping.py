"""Layers that are alike are traced once and stamped into their stage with their own weights."""

from unittest import mock

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from mirrorsd.export.passes import torch_to_onnx
from mirrorsd.export.passes.stamping import count_rows_by_hidden
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
from mirrorsd.export.stages.layer import Layer
from mirrorsd.graphs.contract import StageContract, TensorSpec

ROWS = TensorSpec(name="rows", dtype="float32", shape=(1, "S", 4))
KEPT = TensorSpec(name="kept", dtype="float32", shape=(1, "S", 4))
LAYER = StageContract(name="layer", inputs=(ROWS,), outputs=(ROWS, KEPT))


class Scaled(nn.Module):
    """A layer with a weight, and a factor that is no weight."""

    factor: Tensor

    def __init__(self, number: int, factor: float) -> None:
        super().__init__()
        self.layer_idx = number
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("factor", torch.full((4,), factor))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        (rows,) = inputs
        return torch.tanh(self.linear(rows)) * self.factor, rows + 1


class Tower(nn.Module):
    """A stage of such layers."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        pairs = enumerate(factors)
        self.layers = [Layer(Scaled(number, factor), LAYER, f"layers.{number}.") for number, factor in pairs]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows, kept = inputs[0], []
        for layer in self.layers:
            found = layer({"rows": rows})
            rows = found["rows"]
            kept.append(found["kept"])
        return (rows * 2, *kept)


@pytest.mark.parametrize(("factors", "traces"), [([3.0, 3.0, 3.0], 1), ([3.0, 5.0, 3.0], 2)])
def test_a_stage_computes_what_its_layers_do(factors: list[float], traces: int) -> None:
    """A layer that differs in more than weights is traced for itself; every layer has its own weights."""
    tower = Tower(factors)
    kept = [TensorSpec(name=f"kept.{number}", dtype="float32", shape=(1, "S", 4)) for number in range(len(factors))]
    contract = StageContract(
        name="tower", inputs=(ROWS,), outputs=(TensorSpec(name="out", dtype="float32", shape=(1, "S", 4)), *kept)
    )
    with mock.patch.object(torch_to_onnx, "trace", wraps=torch_to_onnx.trace) as trace:
        model = export_stage(tower, contract, Weights())
    assert trace.call_count == 1 + traces
    assert {node.domain for node in model.graph} == {""}
    assert [value.name for value in model.graph.outputs] == ["out", "kept.0", "kept.1", "kept.2"]
    given = torch.randn(1, 6, 4)
    with torch.no_grad():
        expected = tower(given)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    for found, wanted in zip(session.run(None, {"rows": given.numpy()}), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=1e-5)


def test_rows_are_counted_by_hidden_states() -> None:
    hidden, angles, ids = (
        ir.Value(name=name, shape=ir.Shape((1, rows, 4)))
        for name, rows in (("hidden", "S"), ("cos", "S"), ("ids", "T"))
    )
    sizes = {"start": 1, "end": 2}
    nodes = [ir.node("Shape", [value], sizes) for value in (angles, ids, hidden)] + [ir.node("Shape", [angles])]
    count_rows_by_hidden(ir.Graph([hidden, angles, ids], [], nodes=nodes))
    assert [node.inputs[0] for node in nodes] == [hidden, ids, hidden, angles]


def test_layers_of_another_stage_use_the_same_trace() -> None:
    weights = Weights()
    contract = StageContract(name="tower", inputs=(ROWS,), outputs=(ROWS, KEPT))
    with mock.patch.object(torch_to_onnx, "trace", wraps=torch_to_onnx.trace) as trace:
        for _ in range(2):
            export_stage(Tower([3.0]), contract, weights)
    assert trace.call_count == 3
