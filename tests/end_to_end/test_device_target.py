"""The path of a GPU target, on a processor: tensors that only ONNX Runtime touches, passes as captured graphs."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import TargetPlacement, load_device_map
from mirrorsd.devices.onnxruntime import device as onnx_device
from mirrorsd.devices.onnxruntime.device import check_assignment, place_of
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Place
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, TargetOutput

CUDA = TargetPlacement(provider="CUDAExecutionProvider", graphs=True)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own memory stands for the device's: the host reads and writes it by copies only."""
    monkeypatch.setattr(onnx_device, "place_of", lambda _: Place(kind="cpu", is_device=True))


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
    monkeypatch.setattr(OnnxTargetModel, "captured_rows", (1, 2, 4, 8, 16, 32))  # as for integer weights
    model.device.captures = True
    graphs: list[str] = []
    released: list[int] = []
    run = OnnxStage.run

    def spy(stage: OnnxStage, binding: Any, options: Any = None) -> None:
        graphs.append(options.get_run_config_entry("gpu_graph_id"))
        run(stage, binding, options)

    monkeypatch.setattr(OnnxStage, "run", spy)
    monkeypatch.setattr(OnnxStage, "release", lambda stage, graph: released.append(graph))
    first = model.new_session()
    # Every size of pass is captured when a session opens (three stages each; one row goes with every other size): six
    # rows are then eight of them, and nothing is captured in the middle of a text. Prefill never is.
    assert Counter(graphs) == {"1": 6 * 3, **{str(number): 3 for number in range(2, 7)}}
    graphs.clear()
    by_graph = texts(first)
    assert graphs == ["-1"] * 2 + ["4"] * 3 + ["1"] * 3 + ["4"] * 6
    graphs.clear()
    second = model.new_session()
    assert texts(second)[0].tolist() == by_graph[0].tolist()
    assert set(graphs) == {"-1", *(str(number) for number in range(7, 13))}, "a session shares no graph"
    first.close()
    monkeypatch.undo()
    plainly = texts(open_model(tiny_bundle).new_session())
    assert all(np.array_equal(left, right) for left, right in zip(by_graph, plainly, strict=True))
    assert sorted(graph for graph in released if graph) == [number for number in range(1, 7) for _ in range(3)]


@pytest.mark.usefixtures("on_device")
def test_weights_that_are_floats_have_captured_passes_of_one_size(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(tiny_bundle)
    model.device.captures = True
    sizes: list[int] = []
    filled = OnnxTarget._filled_up
    monkeypatch.setattr(
        OnnxTarget, "_filled_up", lambda self, tokens, size: sizes.append(size) or filled(self, tokens, size)
    )
    texts(model.new_session())
    assert set(sizes) == {30, 32}, "the prompt has its own rows; passes of one and of six have 32"


@pytest.mark.usefixtures("on_device")
def test_at_the_end_of_the_context_a_captured_pass_is_as_long_as_its_rows(tiny_bundle: Path) -> None:
    model = open_model(tiny_bundle)
    plainly, captured = model.new_session(), model.new_session()
    tokens = np.random.default_rng(0).integers(0, plainly.vocab_size, plainly.context)
    last = len(tokens) - 5
    found = []
    for session in (plainly, captured):
        model.device.captures = session is captured
        session.prefill(tokens[:last], 0, ledger=Ledger())
        found.append(session.run(tokens[last:], last, with_logits=True, ledger=Ledger()).logits)
    model.device.captures = False
    assert np.array_equal(*found)


class FakeStream:
    """A queue of the device, as far as a provider's options want to know it."""

    def get_handle(self) -> int:
        return 7


@pytest.mark.usefixtures("on_device")
def test_the_layers_behind_an_exit_are_queued_before_the_exit_is_read(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [FakeStream(), FakeStream()]
    monkeypatch.setattr(onnx_device, "_new_stream", lambda _: streams.pop())
    session = open_model(tiny_bundle).new_session()
    done: list[str] = []
    run, wait = OnnxStage.run, OnnxStage.wait

    def spy_run(stage: OnnxStage, binding: Any, options: Any = None) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        done.append(f"{stage.name} starts")
        run(stage, binding, options)

    def spy_wait(stage: OnnxStage, binding: Any) -> None:
        done.append(f"{stage.name} is done")
        wait(stage, binding)

    monkeypatch.setattr(OnnxStage, "run", spy_run)
    monkeypatch.setattr(OnnxStage, "wait", spy_wait)
    tokens = np.arange(4)
    heard = session.run(tokens, 0, with_logits=False, ledger=Ledger(), on_exit=lambda _: done.append("heard"))
    exit_words = ["exit2 starts", "exit2 is done", "heard"]
    assert done == ["prefix starts", "prefix is done", "suffix starts", *exit_words, "suffix is done"]
    done.clear()
    alone = session.run(tokens, 0, with_logits=False, ledger=Ledger())
    assert done == ["prefix starts", "suffix starts", "suffix is done"], "nobody listens: one wait"
    assert alone.argmax_ids.tolist() == heard.argmax_ids.tolist()


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
