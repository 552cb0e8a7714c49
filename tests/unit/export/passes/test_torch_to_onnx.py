"""From PyTorch modules to graphs."""

import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.torch_to_onnx import Weights, _operators_at_hand, export_stage
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.graphs.contract import StageContract, TensorSpec

WIDTH = 600
"""So large that the exporter leaves a constant as it is where several nodes read it."""


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.product(torch.sin(self.product(inputs[0])))


def test_a_matrix_that_several_products_read_is_turned_once_and_packed() -> None:
    specs = [TensorSpec(name=name, dtype="float32", shape=(1, "S", WIDTH)) for name in ("rows", "found")]
    contract = StageContract(name="twice", inputs=tuple(specs[:1]), outputs=tuple(specs[1:]))
    graph = export_stage(Twice(), contract, Weights())
    assert [node.op_type for node in graph.graph] == ["MatMul", "Sin", "MatMul"]
    chosen = BlockChoice(bits=8, block_size=None, is_symmetric=True, largest=128)
    QuantiseWeights(WeightFormats(layers=chosen, head=chosen, embedding=chosen), 7)(graph)
    products = [node for node in graph.graph if node.op_type == "MatMulNBits"]
    assert len(products) == 2
    assert products[0].inputs[1] is products[1].inputs[1]


def test_the_exporter_reads_its_operators_once_for_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, found = (TensorSpec(name=name, dtype="float32", shape=(1, "S", WIDTH)) for name in ("rows", "found"))
    contract = StageContract(name="twice", inputs=(rows,), outputs=(found,))
    export_stage(Twice(), contract, Weights())
    read = list[object]()
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", read.append)
    export_stage(Twice(), contract, Weights())
    assert not read and vars(ONNXRegistry)["from_torchlib"] == read.append


def test_what_another_exporter_adds_to_its_operators_stays_its_own() -> None:
    sine = torch.ops.aten.sin.default
    with _operators_at_hand():
        theirs = ONNXRegistry.from_torchlib()
        theirs.register_op(sine, lambda rows: rows)
        others = ONNXRegistry.from_torchlib()
    assert len(others.get_decomps(sine)) + 1 == len(theirs.get_decomps(sine))
