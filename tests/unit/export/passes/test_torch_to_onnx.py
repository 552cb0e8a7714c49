"""From PyTorch modules to graphs."""

import onnxscript
import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter import _registration

from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
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
    spec = TensorSpec(name="rows", dtype="float32", shape=(1, "S", WIDTH))
    contract = StageContract(name="twice", inputs=(spec,), outputs=(spec.model_copy(update={"name": "found"}),))
    export_stage(Twice(), contract, Weights())
    usual, read = vars(_registration.ONNXRegistry)["from_torchlib"], list[object]()
    monkeypatch.setattr(_registration.ONNXRegistry, "from_torchlib", read.append)
    export_stage(Twice(), contract, Weights())
    assert not read
    monkeypatch.undo()
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is usual


def test_another_exporter_of_the_process_has_operators_of_its_own() -> None:
    ...
