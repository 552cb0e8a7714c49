"""The path of a GPU target, on a processor: tensors that only ONNX Runtime touches, passes as captured graphs."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import TargetPlacement, load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.onnxruntime import stage as onnx_session
from mirrorsd.runtime.backends.onnxruntime.stage import OnnxStage, check_assignment
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.backends.onnxruntime.tensors import Place, place_of
from mirrorsd.runtime.backends.protocol import ExitGuesses, TargetOutput
from mirrorsd.runtime.ledger import Ledger

CUDA = TargetPlacement(provider="CUDAExecutionProvider", graphs=True)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own memory stands for the device's: the host reads and writes it by copies only."""
    monkeypatch.setattr(onnx_session, "place_of", lambda _: Place(kind="cpu", is_device=True))


def texts(session: OnnxTarget) -> list[Any]:
    """Prefill, a window, a rollback, a single row: all that a decoder asks of a target."""
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, 60)
    session.prefill(tokens[:30], 0, ledger=Ledger())
    found: list[Any] = []
    for size, start in ((6, 30), (1, 33), (6, 34), (6, 36)):
        guesses: list[ExitGuesses] = []
        output = session.run(
            tokens[start : start + size], start, with_logits=True, ledger=Ledger(), on_exit=guesses.append
        )
        assert output.logits is not None
        found += [output.argmax_ids.copy(), output.argmax_gap.copy(), output.logits.copy(), guesses[0].ids]
    return found


def open_model(bundle: Path) -> OnnxTargetModel:
    return OnnxTargetModel(bundle, read_bundle(bundle).target, TargetPlacement())


@pytest.mark.usefixtures("on_device")
def test_tensors_on_a_device_give_the_same_numbers(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = texts(open_model(tiny_bundle).new_session())
    monkeypatch.undo()
    on_host = texts(open_model(tiny_bundle).new_session())
    assert all(np.array_equal(left, right) for left, right in zip(on_device, on_host, strict=True))


@pytest.mark.usefixtures("on_device")
def test_captured_passes_keep_their_length_and_give_the_same_numbers(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(tiny_bundle)
    model.device.captures = True
    graphs: list[str] = []
    released: list[int] = []
    run = OnnxStage.run

    def spy(stage: OnnxStage, binding: Any, options: Any = None) -> None:
        graphs.append(options.get_run_config_entry("gpu_graph_id"))
        run(stage, binding, options)

    monkeypatch.setattr(OnnxStage, "run", spy)
    monkeypatch.setattr(OnnxStage, "release", lambda stage, graph: released.append(graph))
    first, second = model.new_session(), model.new_session()
    by_graph = texts(first)
    assert texts(second)[0].tolist() == by_graph[0].tolist()
    first.close()
    monkeypatch.undo()
    plainly = texts(open_model(tiny_bundle).new_session())
    assert all(np.array_equal(left, right) for left, right in zip(by_graph, plainly, strict=True))
    # Two segments of prefill are never captured; six rows are one graph, one row another; a session shares none.
    assert graphs[:2] == ["-1", "-1"]
    assert graphs[2:14] == ["1"] * 3 + ["2"] * 3 + ["1"] * 6
    assert set(graphs[14:]) == {"-1", "3", "4"}
    assert sorted(graph for graph in released if graph) == [1] * 3 + [2] * 3


def test_what_would_run_elsewhere_is_named() -> None:
    nodes = Counter({("CUDAExecutionProvider", "MatMul"): 9, ("CPUExecutionProvider", "TopK"): 1})
    with pytest.raises(DeviceError, match=r"CUDAExecutionProvider does not take all of suffix.onnx: TopK on CPU"):
        check_assignment("suffix.onnx", "CUDAExecutionProvider", "CUDAExecutionProvider", nodes)
    with pytest.raises(DeviceError, match=r"put suffix.onnx on CPUExecutionProvider, the device map asks for CUDA"):
        check_assignment("suffix.onnx", "CUDAExecutionProvider", "CPUExecutionProvider", nodes)


def test_a_provider_that_is_not_there_is_a_device_error(tiny_bundle: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has the provider")
    assert place_of(CUDA) == Place(kind="cuda", is_device=True)
    with pytest.raises(DeviceError, match="CUDAExecutionProvider"):
        OnnxTargetModel(tiny_bundle, read_bundle(tiny_bundle).target, CUDA)


def test_every_node_is_accounted_for(tiny_bundle: Path) -> None:
    model = open_model(tiny_bundle)
    for _, stage in model.segments:
        assert {provider for provider, _ in stage.nodes} == {"CPUExecutionProvider"}
        assert stage.nodes["CPUExecutionProvider", "GroupQueryAttention"] == 2
    assert "CPUExecutionProvider (all " in model.describe()


@pytest.fixture(scope="module")
def gpu() -> Any:
    """`bench/studies/gpu.py`."""
    path = Path(__file__).parents[2] / "bench" / "studies" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gpu_check_runs_through_and_passes_a_target_that_is_its_own_reference(
    tiny_bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    card = load_device_map("cpu")
    assert gpu.bandwidth(card.target) > 1e8
    found = gpu.check(tiny_bundle, card, 1e10, 8, 1)
    assert found["is_fine"]
    assert (found["largest_error"], found["same_top1"], found["positions"]) == (0.0, 1.0, 64)
    gpu.print_table([found])
    assert "tiny.mirror" in capsys.readouterr().out


class WrongTarget:
    """A target whose every eighth row is computed wrongly: its best token is another one."""

    def __init__(self, right: OnnxTarget) -> None:
        self.vocab_size, self.prefill, self._run = right.vocab_size, right.prefill, right.run

    def run(self, *arguments: Any, **options: Any) -> TargetOutput:
        output = self._run(*arguments, **options)
        assert output.logits is not None
        logits = output.logits.copy()
        logits[0] = -logits[0]
        return output._replace(logits=logits)


def test_the_gpu_check_finds_a_target_that_computes_something_else(tiny_bundle: Path, gpu: Any) -> None:
    model = open_model(tiny_bundle)
    found = gpu.parity(WrongTarget(model.new_session()), model.new_session())
    assert found["same_top1"] == 1 - 1 / 8
    assert found["largest_error"] > 1.0
    assert not any(gpu.is_close(found, dtype) for dtype in ("float32", "float16"))


def test_a_bundle_that_a_gpu_refuses_is_a_row_with_the_reason(
    tiny_bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    row = gpu.check_or_reason(tiny_bundle, load_device_map("cuda-cpu"), 1e10, 8, 1)
    assert (row["bundle"], row["precision"], row["is_fine"]) == ("tiny.mirror", "fp32", False)
    gpu.print_table([row])
    assert "tiny.mirror: refused: this bundle's target computes in float32" in capsys.readouterr().out
