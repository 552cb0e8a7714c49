"""The bundle as a whole: what is in it, that it is checked, and that a failed export leaves nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.pair import _BuiltDraft
from mirrorsd.export.verify import target as verify_target
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, ExportError, ParityError
from mirrorsd.graphs.manifest import DraftAccuracy, VerifyResult
from mirrorsd.graphs.quality_bounds import quality_warnings

KILLED = """
import os, signal, sys
from pathlib import Path
from mirrorsd.export import ExportOptions, export_pair

def watch(stage, fraction):
    if stage == "export suffix":
        os.kill(os.getpid(), signal.SIGKILL if os.name != "nt" else signal.SIGTERM)

folder = Path(sys.argv[1])
export_pair(folder / "target", folder / "draft", folder / "out.mirror", ExportOptions(precision="fp32"), watch)
"""

VARYING = "draft/draft.xml"
"""OpenVINO does not write the same graph in the same words every time."""

IN_FP32 = ExportOptions(precision="fp32")


def test_the_bundle_reads_back_and_says_how_exact_it_is(llama_pair: Any) -> None:
    manifest = read_bundle(llama_pair.bundle)
    assert manifest == llama_pair.manifest
    assert {result.stage for result in manifest.verify} == {"prefix", "suffix", "exit2", "draft"}
    for result in manifest.verify:
        assert result.max_abs_error <= 1e-4
        assert result.max_relative_error <= 1e-4
        assert result.mean_divergence <= 1e-9
        assert result.top1_agreement == 1.0
        assert result.positions >= 256
    assert manifest.target.exits[0].adapter_rank == 8
    assert manifest.draft.capacities == (256, 384)
    assert {"torch", "onnxruntime", "openvino", "transformers"} <= set(manifest.versions)


def test_an_fp32_target_costs_no_quality(llama_pair: Any) -> None:
    quality = llama_pair.manifest.quality
    assert quality.text == "built-in"
    assert quality.positions >= 1000
    assert quality.top1_agreement == 1.0
    assert quality.perplexity == pytest.approx(quality.reference_perplexity, rel=1e-4)
    assert quality_warnings(quality) == ()


def test_what_the_checkpoint_says_is_carried_over(llama_pair: Any) -> None:
    manifest = llama_pair.manifest
    assert manifest.target.source.licence == "mit"
    assert manifest.tokens.eos_ids == (0, 5)
    assert manifest.generation == {"temperature": 0.7, "top_k": 20}
    assert manifest.exit_coverage == {"positions": 3}
    assert (llama_pair.bundle / "licences" / "target" / "README.md").is_file()
    template = (llama_pair.bundle / "tokenizer" / "chat_template.jinja").read_text()
    assert template == "{{ messages[0]['content'] }}"
    assert (llama_pair.bundle / "tokenizer" / "tokenizer_config.json").is_file()


def test_shared_weights_are_written_once(llama_pair: Any) -> None:
    """Embedding, exit head and suffix head of a tied target are the same bytes."""
    weights = load_file(llama_pair.target / "model.safetensors")
    stored = sum(array.size * 4 for array in weights.values())
    written = (llama_pair.bundle / "target" / "weights.bin").stat().st_size
    tables = 2 * 384 * 16 * 4
    padding = 4096 * (len(weights) + 8)
    assert written <= stored + tables + padding
    assert written < stored + weights["model.embed_tokens.weight"].nbytes


def test_progress_goes_from_check_to_done(llama_pair: Any) -> None:
    shares = [share for _, share in llama_pair.progress]
    assert shares == sorted(shares)
    assert llama_pair.progress[0] == ("check", 0.0)
    assert llama_pair.progress[-1] == ("done", 1.0)
    assert "export suffix" in dict(llama_pair.progress)


def test_two_exits_make_three_segments(qwen3_pair: Any) -> None:
    target = qwen3_pair.manifest.target
    assert [(s.name, s.first_layer, s.end_layer) for s in target.segments] == [
        ("prefix", 0, 1),
        ("middle", 1, 2),
        ("suffix", 2, 3),
    ]
    assert [point.name for point in target.exits] == ["exit1", "exit2"]


@pytest.fixture
def pair(llama_pair: Any, tmp_path: Path) -> Path:
    """A copy of the checkpoints to damage."""
    for role in ("target", "draft"):
        shutil.copytree(getattr(llama_pair, role), tmp_path / role)
    return tmp_path


def _export(pair: Path, **options: Any) -> None:
    export_pair(pair / "target", pair / "draft", pair / "out.mirror", ExportOptions(**{"precision": "fp32", **options}))


def _left(pair: Path) -> set[str]:
    return {path.name for path in pair.iterdir()}


def _kill(llama_pair: Any, pair: Path, stage: str) -> None:
    """Leave what an export of `pair` leaves that is killed when it reports `stage`."""
    shutil.copytree(llama_pair.killed_at[stage], pair / ".out.mirror.partial")


def test_ctrl_c_in_the_middle_leaves_nothing(llama_pair: Any, pair: Path) -> None:
    _kill(llama_pair, pair, "carry over")

    def stop(stage: str, share: float) -> None:
        if stage == "verify target":
            assert (pair / ".out.mirror.partial" / "target" / "prefix.onnx").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pair(pair / "target", pair / "draft", pair / "out.mirror", IN_FP32, stop)
    assert _left(pair) == {"target", "draft"}


@pytest.mark.long
def test_a_kill_leaves_what_is_on_disk(llama_pair: Any, pair: Path) -> None:
    """A real SIGKILL; the other tests take the copy that it is compared with for one."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(pair)], check=False)
    assert killed.returncode != 0
    assert _left(pair) == {"target", "draft", ".out.mirror.partial", ".out.mirror.lock"}
    left, copied = (_contents(f) for f in (pair / ".out.mirror.partial", llama_pair.killed_at["export suffix"]))
    assert {**left, VARYING: b""} == {**copied, VARYING: b""}


def _contents(folder: Path) -> dict[str, bytes]:
    """Files by name; graphs without names of their own making, which count what was traced before in a process."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: _numbered(content) if name.endswith(".onnx") else content for name, content in found.items()}


def _numbered(content: bytes) -> bytes:
    """A graph whose values are numbers, in their order, but for inputs and outputs."""
    graph = (model := onnx.ModelProto.FromString(content)).graph
    numbers = {value.name: value.name for value in (*graph.input, *graph.output)} | {"": ""}
    for tensor in graph.initializer:
        tensor.name = numbers.setdefault(tensor.name, str(len(numbers)))
    for node in graph.node:
        node.name = ""
        node.input[:] = [numbers[name] for name in node.input]
        node.output[:] = [numbers.setdefault(name, str(len(numbers))) for name in node.output]
    del graph.value_info[:]
    return bytes(model.SerializeToString(deterministic=True))


@pytest.mark.parametrize(
    ("stage", "finished"),
    [
        pytest.param("export suffix", {"draft", "prefix"}, id="while the suffix is written"),
        pytest.param("carry over", {"prefix", "suffix", "exit2", "draft"}, id="nearly at the end"),
    ],
)
def test_a_killed_export_goes_on_from_its_finished_stages(
    llama_pair: Any, pair: Path, stage: str, finished: set[str]
) -> None:
    """The target's stages are exported anew where they are missing."""
    _kill(llama_pair, pair, stage)
    with (pair / ".out.mirror.partial" / "target" / "weights.bin").open("ab") as stream:
        stream.write(b"half-written")
    (pair / ".out.mirror.partial" / "tokenizer").mkdir(exist_ok=True)
    progress: list[str] = []
    export_pair(
        pair / "target",
        pair / "draft",
        pair / "out.mirror",
        IN_FP32,
        lambda stage, _: progress.append(stage),
    )
    assert {"prefix", "suffix", "exit2", "draft"} & set(progress[1].split(": ")[1].split(", ")) == finished
    assert not {f"export {name}" for name in finished - {"draft"}} & set(progress)
    assert "verify target" in progress, "what was kept is verified like everything else"
    assert _left(pair) == {"target", "draft", "out.mirror"}
    found, expected = read_bundle(pair / "out.mirror"), llama_pair.manifest
    assert found.verify == expected.verify
    assert {**found.files, VARYING: None} == {**expected.files, VARYING: None}


def test_a_wrong_graph_is_refused(llama_pair: Any, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is off by 0.01 stands for a graph that is; the graphs themselves are those already exported."""
    exact = verify_target.stored_reference

    def shifted(*args: Any) -> Any:
        reference = exact(*args)
        return reference._replace(logits=reference.logits + np.float32(0.01))

    def reuse(model: Any, plan: Any, bundle: Path, *_: Any) -> None:
        shutil.copytree(llama_pair.bundle / "target", bundle / "target")

    _leave_out_the_draft(monkeypatch)
    monkeypatch.setattr("mirrorsd.export.pair.stored_reference", shifted)
    monkeypatch.setattr("mirrorsd.export.pair.write_target", reuse)
    with pytest.raises(
        ParityError, match=r"stage 'suffix' is not what PyTorch computes .* over \d+ positions: largest error 0\.0"
    ):
        _export(pair)
    assert _left(pair) == {"target", "draft"}


def test_auto_cuts_where_the_measured_coverage_says(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter after layer 2 is there, so it counts with its 0.9; untrained, layer 1 would win."""
    shares = {"untrained": {"8": 0.5}, "adapter": {"8": 0.9}}
    (pair / "target" / "exit_coverage.json").write_text(json.dumps({"layers": {"1": shares, "2": shares, "3": shares}}))
    planned: list[Any] = []

    def stop(model: Any, plan: Any, *_: Any) -> None:
        planned.append(list(plan.adapters))
        raise KeyboardInterrupt

    _leave_out_the_draft(monkeypatch)
    monkeypatch.setattr("mirrorsd.export.pair.write_target", stop)
    with pytest.raises(KeyboardInterrupt):
        _export(pair)
    (pair / "target" / "exit_adapters.safetensors").unlink()
    with pytest.raises(KeyboardInterrupt):
        _export(pair)
    assert planned == [[2], [1]]


def _leave_out_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorsd.export.pair._build_draft", lambda *_: _BuiltDraft(None, (), None))


def test_a_wrong_draft_is_refused_before_the_target_is_exported(
    llama_pair: Any, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target may take an hour; other weights than the graph was made of stand for a graph that is wrong."""
    monkeypatch.setattr("mirrorsd.export.pair.draft_graph", lambda *_, **__: None)
    monkeypatch.setattr(
        "mirrorsd.export.pair.write_draft",
        lambda *_: shutil.copytree(
            llama_pair.bundle / "draft", pair / ".out.mirror.partial" / "draft", dirs_exist_ok=True
        ),
    )
    asked: list[str] = []
    weights = load_file(pair / "draft" / "model.safetensors")
    shifted = {name: weight + np.float32(0.01) if "q_proj" in name else weight for name, weight in weights.items()}
    save_file(shifted, pair / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParityError, match="stage 'draft' is not what PyTorch computes"):
        export_pair(
            pair / "target",
            pair / "draft",
            pair / "out.mirror",
            IN_FP32,
            lambda stage, _: asked.append(stage),
        )
    assert not {"load target", "export prefix"} & set(asked)
    assert _left(pair) == {"target", "draft"}


def test_a_lossy_draft_is_refused_before_the_target_and_what_is_finished_is_kept(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same export with the option that the refusal names goes on from the draft that is there."""
    poor = DraftAccuracy(
        scheme="int8", agreement=(0.5,) * 4, accepted_before=2.0, accepted_after=1.0, num_windows=99, num_positions=99
    )
    monkeypatch.setattr("mirrorsd.export.draft_compression.compare_drafts", lambda *_: poor)
    asked: list[str] = []

    def until_the_target(stage: str, share: float) -> None:
        asked.append(stage)
        if stage == "load target":
            raise KeyboardInterrupt

    def again(**options: Any) -> None:
        export_pair(
            *(pair / name for name in ("target", "draft", "out.mirror")),
            ExportOptions(draft_precision="int8", **options),
            until_the_target,
        )

    with pytest.raises(ExportError, match=r"keep 50\.0% .* What is finished is kept: choose fp16.*--allow-draft-loss"):
        again()
    assert "load target" not in asked
    assert _left(pair) == {"target", "draft", ".out.mirror.partial"}
    monkeypatch.setattr("mirrorsd.export.pair.draft_graph", lambda *_, **__: pytest.fail("exported again"))
    with pytest.raises(KeyboardInterrupt):
        again(allow_draft_loss=True)
    assert "going on from an earlier export, which had finished: draft" in asked
    assert asked[-2:] == ["compress draft", "load target"]


def test_an_fp16_draft_with_linked_streams_is_held_against_its_rounded_weights(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[VerifyResult] = []

    def seen(results: Any, tolerance: Any) -> None:
        compared.extend(results)
        raise KeyboardInterrupt

    monkeypatch.setattr("mirrorsd.export.pair.check_parity", seen)
    with pytest.raises(KeyboardInterrupt):
        _export(pair, draft_precision="fp16")
    assert compared[0].max_relative_error < 1e-3
    assert compared[0].top1_agreement >= 0.99


def test_a_draft_whose_window_ends_within_the_context_is_refused(pair: Path) -> None:
    _change_config(pair / "draft", model_type="mistral", sliding_window=100)
    with pytest.raises(ConfigError, match="the draft has layers that see 100 tokens, the context is 384"):
        _export(pair)


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_that_do_not_belong_to_the_config_are_refused(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_config(pair / "target", num_hidden_layers=5)
    with pytest.raises(ExportError, match=r"lacks \d+ weights, for example 'model\.layers\.4"):
        _export(pair)
    assert _left(pair) == {"target", "draft", ".out.mirror.partial"}, "the draft is finished"
    _leave_out_the_draft(monkeypatch)
    _change_config(pair / "target", num_hidden_layers=4, intermediate_size=128)
    with pytest.raises(ExportError, match="cannot be loaded"):
        _export(pair)


def test_damaged_files_beside_the_weights_are_refused(pair: Path) -> None:
    (pair / "target" / "exit_adapters.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ExportError, match=r"exit_adapters\.safetensors cannot be read"):
        _export(pair)
    save_file({"x": np.ones(3, np.float32)}, pair / "target" / "exit_adapters.safetensors", {"format": "other"})
    with pytest.raises(ExportError, match="has format 'other'; this mirrorsd reads 'mirrorsd-exit-1'"):
        _export(pair)
    assert _left(pair) == {"target", "draft"}


@pytest.mark.filterwarnings("ignore:module forward hook")  # PyTorch says so of any error behind a hook
def test_a_disk_that_is_full_of_the_inputs_of_products_is_said_to_be(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 40, 0]
    monkeypatch.setattr("mirrorsd.graphs.atomic_folder.shutil.disk_usage", lambda _: SimpleNamespace(free=free.pop(0)))
    with pytest.raises(ExportError, match=r"MB are needed, 0\.0 MB are free\. Free some"):
        _export(pair, precision="int8", products="integer")
    assert not free
    assert _left(pair) == {"target", "draft"}


def test_options_that_do_not_fit_this_pair_are_refused(pair: Path) -> None:
    with pytest.raises(ConfigError, match="context is 4096; the target was made for 384"):
        _export(pair, context=4096)
    with pytest.raises(ConfigError, match=r"exit layer is 4; this target allows 1\.\.3"):
        _export(pair, exit_layers=(4,))
    with pytest.raises(ConfigError, match="400 candidates were asked for; this vocabulary has 320 tokens"):
        _export(pair, num_draft_candidates=400)
    (pair / "out.mirror").mkdir()
    (pair / "out.mirror" / "manifest.json").touch()
    with pytest.raises(ExportError, match="exists already; choose another name, or replace it with `--overwrite`"):
        _export(pair)
