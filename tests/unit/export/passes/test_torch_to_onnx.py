"""From PyTorch modules to graphs."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxscript.rewriter import RewriteRule
from torch import Tensor, nn
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from mirrorsd.export.passes import torch_to_onnx
from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.torch_to_onnx import Weights, _nothing_twice, export_stage
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
    with _nothing_twice():
        theirs = ONNXRegistry.from_torchlib()
        theirs.register_op(sine, lambda rows: rows)
        others = ONNXRegistry.from_torchlib()
    assert len(others.get_decomps(sine)) + 1 == len(theirs.get_decomps(sine))


class Promoted(nn.Module):
    """Whole numbers beside others."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0].abs() * torch.arange(5)


def test_types_are_looked_up_and_patterns_tried_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the trace no node is computed but what is promoted, and nothing is matched at other operators."""
    computed, tried, run, match = list[str](), set[tuple[str, str]](), torch.fx.Interpreter.run_node, RewriteRule.match

    def run_node(self: torch.fx.Interpreter, node: torch.fx.Node) -> object:
        computed.append(str(node.target) if node.op == "call_function" else node.op)
        return run(self, node)

    def matched(self: Any, model: Any, graph: Any, node: ir.Node, **settings: Any) -> object:
        tried.add((self._target_pattern.output_nodes[0].op_type, node.op_type))
        return match(self, model, graph, node, **settings)

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", run_node)
    monkeypatch.setattr(RewriteRule, "match", matched)
    model = _exported(Promoted())
    assert {"prims.convert_element_type.default", "aten.mul.Tensor"} <= {*computed}
    assert "aten.abs.default" not in computed
    assert ("Mul", "Mul") in tried and all(pattern == node for pattern, node in tried)
    _computes_the_same(model, Promoted())


def _elsewhere() -> NoReturn:
    raise ImportError("it has no such part")


@pytest.mark.parametrize("find", [_elsewhere, lambda: (torch.fx.config, "no_such_setting", True)])
def test_another_version_s_exporter_computes_the_same(monkeypatch: pytest.MonkeyPatch, find: Callable[[], Any]) -> None:
    monkeypatch.setattr(torch_to_onnx, "_PARTS", (find,))
    _computes_the_same(_exported(Promoted()), Promoted())
    assert not hasattr(torch.fx.config, "no_such_setting")


def _exported(module: nn.Module) -> ir.Model:
    rows, found = (TensorSpec(name=name, dtype="float32", shape=(1, "S", 5)) for name in ("rows", "found"))
    return export_stage(module, StageContract(name="forms", inputs=(rows,), outputs=(found,)), Weights())


def _computes_the_same(model: ir.Model, module: nn.Module) -> None:
    given = np.linspace(-1, 2, 20, dtype=np.float32).reshape(1, 4, 5)
    content = ir.serde.serialize_model(model).SerializeToString()
    (computed,) = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"rows": given})
    assert np.array_equal(computed, module(torch.from_numpy(given)).numpy())


class Decomposed(nn.Module):
    """What PyTorch writes with other operators than ONNX has; a place is changed if asked for."""

    def __init__(self, *, is_changing: bool) -> None:
        super().__init__()
        self.is_changing = is_changing

    def forward(self, *inputs: Tensor) -> Tensor:
        found = (1 - inputs[0].square()).detach_().to(torch.float64).to(torch.float64)
        found = torch.where((found > 0) & (found < 1), found, torch.rsub(found, 2, alpha=3)).to(torch.float32)
        return found.add_(1) if self.is_changing else found.to(torch.float32)


@pytest.mark.parametrize("is_changing", [False, True])
def test_a_graph_whose_operators_have_forms_in_onnx_is_traced_once(
    monkeypatch: pytest.MonkeyPatch, *, is_changing: bool
) -> None:
    traced_again, usual = list[object](), _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *both: traced_again.append(both) or usual(*both))
    module = Decomposed(is_changing=is_changing)
    model = _exported(module)
    assert bool(traced_again) == is_changing
    _computes_the_same(model, module)
