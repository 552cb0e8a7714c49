"""The comparison with other runtimes, without them: what it makes of folders, turns and answers."""

import argparse
import doctest
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mirrorsd.bench.claims.peers import table
from mirrorsd.cli.input.prompt_file import Question

FOLDER = Path(__file__).resolve().parents[3] / "bench" / "claims" / "peers"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("compare")


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prepare")


@pytest.fixture
def worker() -> ModuleType:
    return importlib.import_module("mirrorsd.cli.bench.peer_worker")


class FakeWorker:
    """A process that answers with the next of given times, always the same text."""

    def __init__(self, ids: list[int], seconds: list[float]) -> None:
        self.ids, self._seconds = ids, iter(seconds)
        self.requests: list[dict[str, Any]] = []

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        ids = self.ids[: request["most"]]
        return {"ids": ids, "num_tokens": len(ids), "seconds": next(self._seconds), "passes": 2}


def answered(name: str, texts: dict[str, tuple[list[int], list[float]]]) -> Any:
    """A contestant that is done: by prompt its text (all ended after it) and seconds per repeat."""
    answers = {
        prompt: [{"ids": ids, "num_tokens": len(ids) + 1, "seconds": each, "passes": 2} for each in seconds]
        for prompt, (ids, seconds) in texts.items()
    }
    return SimpleNamespace(name=name, runtime=name.split()[0], answers=answers)


def test_a_row_is_the_mean_of_the_tasks_and_a_task_its_tokens_over_their_time() -> None:
    first = answered("a plain", {"p": ([1, 2, 3], [1.0]), "q": ([1], [1.0]), "r": ([5], [1.0])})
    second = answered("b plain", {"p": ([1, 2, 9], [0.5]), "q": ([1], [2.5]), "r": ([5], [1.0])})
    tasks = {"p": "sums", "q": "sums", "r": "story"}
    row = table.row(second, first, tasks, {"p": [0.5, 4.0]})
    assert row["by_task"] == {"sums": (4 + 2) / (0.5 + 2.5), "story": 2.0}
    assert row["tokens_per_second"] == 2.0
    assert row["tokens_per_pass"] == round((4 + 2 + 2) / 6, 3)
    assert (row["same_text"], row["first_difference_at"]) == (2, [2])
    assert (row["num_tokens"], row["seconds"]["p"]) == ({"p": 4, "q": 2, "r": 2}, [0.5, 4.0, 0.5])


def test_the_best_of_each_runtime_counts(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"mirrorsd plain": 5.0, "mirrorsd auto": 9.0, "peer draft 2": 4.0, "peer draft 8": 6.0}
    rows = [
        {"name": name, "runtime": name.split()[0], "tokens_per_second": speed, "tokens_per_pass": None}
        | {"same_text": 1, "first_difference_at": []}
        for name, speed in speeds.items()
    ]
    best = table.best_of_each(rows)
    assert best["peer"] == {"name": "peer draft 8", "tokens_per_second": 6.0, "auto_to_it": 1.5}
    report = {"precision": "fp32", "prompts": ["p"], "tokens": 9, "threads": 2, "ends": "honoured", "too_long": 3}
    table.print_table(report | {"rows": rows, "best": best, "disturbed": []})
    printed = capsys.readouterr().out
    assert "end of text honoured, 3 questions too long" in printed
    assert "best of peer: draft 8, 6.0 tokens/s" in printed


def test_peers_draft_several_numbers_of_tokens_in_one_process_per_model(compare: ModuleType) -> None:
    words = {"target": "big", "draft": "small", "precision": "int8", "draft_precisions": None, "drafted": "2,12"}
    options = argparse.Namespace(**words, cache=Path("c"), bundle=Path("b"), device_map="cpu", llama_cpp=None)
    found = compare.entries(options)
    drafting = {entry["name"]: entry["settings"] for entry in found if "num_drafted" in entry["settings"]}
    assert {settings["num_drafted"] for settings in drafting.values()} == {2, 12}
    assert {name.rsplit(" ", 1)[0] for name in drafting} == {
        "openvino-genai prompt lookup",
        "openvino-genai draft",
        "onnxruntime-genai draft",
    }
    assert len({json.dumps([e["runtime"], e["model"], e.get("draft"), e["options"]]) for e in found}) == 6


def test_llama_cpp_takes_part_with_a_server_per_way_to_draft(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = SimpleNamespace(target=SimpleNamespace(context=256))
    monkeypatch.setattr(compare, "read_bundle", lambda folder: bundle)
    (tmp_path / "llama-server").touch()
    words = {"target": "big", "draft": "small", "precision": "int4", "drafted": "2,8", "llama_cpp": str(tmp_path)}
    found = compare.entries_of_llama_cpp(argparse.Namespace(**words, cache=tmp_path, bundle=Path("b")))
    server = {"server": str(tmp_path / "llama-server"), "context": 256}
    assert {each["name"]: each["options"] for each in found} == {
        "llama.cpp plain": server,
        "llama.cpp lookup 2": server | {"num_drafted": 2, "longest_ngram": 2},
        "llama.cpp draft 2": server | {"num_drafted": 2},
        "llama.cpp lookup 8": server | {"num_drafted": 8, "longest_ngram": 3},
        "llama.cpp draft 8": server | {"num_drafted": 8},
    }
    assert {each["model"] for each in found} == {str(tmp_path / "llama.cpp" / "big-int4.gguf")}
    drafts = {each.get("draft") for each in found if "draft" in each["name"]}
    assert drafts == {str(tmp_path / "llama.cpp" / "small-int4.gguf")}


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="only Linux tells what a process has used")
def test_what_a_worker_starts_counts_as_its_own_use_of_the_processor(compare: ModuleType) -> None:
    child = "while True: pass"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    contestant = SimpleNamespace(worker=SimpleNamespace(pid=process.pid))
    used, deadline = 0.0, monotonic() + 30
    while used < 0.5 and monotonic() < deadline:
        used = compare.cpu_of_children([contestant])
        sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert used >= 0.5


@pytest.mark.parametrize("rank", [None, 2])
def test_a_draft_is_written_out_with_its_target_s_embedding_and_a_whole_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int | None
) -> None:
    target, draft, output = tmp_path / "target", tmp_path / "draft", tmp_path / "ordinary"
    rng = np.random.default_rng(3)
    drawn = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES[rank].items()}
    embedding = rng.standard_normal((5, 4), dtype=np.float32)
    for folder, weights in ((target, {"model.embed_tokens.weight": embedding}), (draft, drawn)):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
    save_file({"link": embedding}, draft / "streams.safetensors")
    config = {"hidden_size": 4, "head_rank": rank, "shares_embedding": True}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["ordinary_draft.py", str(target), str(draft), str(output)])
    runpy.run_path(str(FOLDER / "ordinary_draft.py"), run_name="__main__")
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((output / "config.json").read_text(encoding="utf-8")) == {"hidden_size": 4}
    found = load_file(output / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding)
    head = drawn["lm_head.weight"] @ drawn["model.norm.down.weight"] if rank else drawn["lm_head.weight"]
    np.testing.assert_allclose(found["lm_head.weight"], head, rtol=1e-6)
    assert set(found) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


SHAPES: dict[int | None, dict[str, tuple[int, ...]]] = {
    None: {"model.norm.weight": (4,), "lm_head.weight": (5, 4)},
    2: {"model.norm.norm.weight": (4,), "model.norm.down.weight": (2, 4), "lm_head.weight": (5, 2)},
}
"""Of a draft without layers, with a head of its own and with one of rank 2."""


def test_a_draft_that_is_ordinary_already_is_left_alone(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert prepare.ordinary(Path("python"), tmp_path, tmp_path, tmp_path) == tmp_path
    (tmp_path / "streams.safetensors").touch()
    (tmp_path / "ordinary" / tmp_path.name).mkdir(parents=True)
    assert prepare.ordinary(Path("python"), tmp_path, tmp_path, tmp_path) == tmp_path / "ordinary" / tmp_path.name


def test_an_int4_model_is_fitted_to_a_text_once(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the export of int4 with default settings, which comes next, leaves it alone."""
    ran: list[list[str]] = []

    def run(program: Path, *arguments: object) -> None:
        ran.append([str(argument) for argument in arguments])
        Path(ran[-1][-1]).mkdir(parents=True)

    monkeypatch.setattr(prepare, "run", run)
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("one")
    other.write_text("two")
    output = prepare.place(tmp_path, "openvino", tmp_path / "big", "int4")
    for _ in range(2):
        prepare.check_fitted(output, text)
        prepare.fit_openvino(Path("python"), tmp_path / "big", text, output)
    for given in (other, None):
        with pytest.raises(SystemExit, match="is there already, fitted to"):
            prepare.check_fitted(output, given)
    prepare.export_openvino(Path("python"), tmp_path / "big", output, "int4")
    assert output.is_dir()
    assert [words[:3] for words in ran] == [
        [str(FOLDER / "fitted_int4.py"), str(tmp_path / "big"), str(tmp_path / "text.txt")]
    ]


def test_a_gguf_file_is_converted_once_and_quantised_by_llama_cpp_s_own_programs(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = []

    def run(program: Path, *arguments: object) -> None:
        words = [str(program), *map(str, arguments)]
        ran.append(words)
        Path(words[words.index("--outfile") + 1] if "--outfile" in words else words[-2]).touch()

    monkeypatch.setattr(prepare, "run", run)
    for precision in ("fp32", "int8", "int4", "int4"):
        output = tmp_path / "llama.cpp" / f"big-{precision}.gguf"
        prepare.export_llama_cpp(Path("python"), tmp_path / "big", output, tmp_path / "bin")
        assert output.is_file()
    assert [words[0] for words in ran] == ["python", *[str(tmp_path / "bin" / "llama-quantize")] * 2]
    assert [words[-1] for words in ran] == [str(tmp_path / "big"), "Q8_0", "Q4_0"]
    assert sorted(path.name for path in (tmp_path / "llama.cpp").iterdir()) == [
        f"big-{precision}.gguf" for precision in ("fp32", "int4", "int8")
    ]


def test_a_request_names_the_ends_and_its_own_settings(compare: ModuleType) -> None:
    worker = FakeWorker([4, 5], [1.0])
    entry = {"name": "peer draft 3", "runtime": "peer", "settings": {"num_drafted": 3}}
    contestant = compare.Contestant(entry, worker)
    contestant.decode([7], compare.Limits(9, (2,)))
    assert worker.requests == [{"ids": [7], "most": 9, "ends": [2], "settings": {"num_drafted": 3}}]


class FakeSession:
    """A session that takes its time to forget a text."""

    def __init__(self) -> None:
        self.read: list[list[int] | None] = []

    def forget(self) -> None:
        self.read.append(None)
        sleep(0.2)

    def generate(self, *, token_ids: list[int], max_new_tokens: int, **settings: Any) -> Any:
        self.read.append(token_ids)
        return SimpleNamespace(token_ids=(4,), stats=SimpleNamespace(steps=1, time_to_first_token_ms=1.0))


def test_ours_forgets_a_prompt_before_it_reads_it_again_and_off_the_clock(
    worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    pipe = SimpleNamespace(session=lambda: session)
    monkeypatch.setattr("mirrorsd.MirrorPipeline", SimpleNamespace(load=lambda *words, **settings: pipe))
    runtime = worker.Mirrorsd(Path("b"), None, 2, {"device_map": "cpu"})
    asked = worker.Asked(ids=[5, 6], most=4, ends=[], settings={"method": "auto"})
    found = [runtime.decode(asked), runtime.decode(asked)]
    assert session.read == [None, [5, 6], None, [5, 6]]
    assert all(each.seconds < 0.2 for each in found)


def test_prompts_are_spread_over_every_task(compare: ModuleType) -> None:
    questions = [Question(question_id=i, category=("rag", "math", "stem")[i % 3], turns=("x",)) for i in range(12)]
    assert [question.question_id for question in compare.choose(questions, 2)] == [0, 6, 1, 7]


def test_a_report_with_other_ends_is_not_continued(compare: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"rows": []}), encoding="utf-8")
    assert compare.read_earlier(path, "ignored") == {"rows": []}
    with pytest.raises(SystemExit, match="was measured with the end of text ignored"):
        compare.read_earlier(path, "honoured")


def test_the_token_that_ends_a_text_counts_whether_it_is_returned_or_not(worker: ModuleType) -> None:
    assert doctest.testmod(worker).failed == 0
    asked = worker.Asked(ids=[5], most=3, ends=[2, 9], settings={})
    assert worker.count_tokens([7, 9], asked) == worker.count_tokens([7], asked) == ([7], 2)
    assert worker.count_tokens([7, 7, 2], asked) == worker.count_tokens([7, 7], asked) == ([7, 7], 3)
    ignored = asked._replace(ends=[])
    assert worker.count_tokens([7, 2, 9], ignored) == ([7, 2, 9], 3)


@pytest.mark.parametrize(
    ("sizes", "is_adjusted"),
    [((576, 9, 1536), True), ((384, 6, 896), False), ((512, 8, 1000), True)],
    ids=["hidden size", "neither", "intermediate size"],
)
def test_int4_groups_are_adjusted_where_128_does_not_divide(
    prepare: ModuleType, tmp_path: Path, sizes: tuple[int, int, int], *, is_adjusted: bool
) -> None:
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    config = dict(zip(names, sizes, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ("--group-size", "128", "--group-size-fallback", "adjust")
    assert prepare.fallback(tmp_path, "int4") == (words if is_adjusted else ())
    assert prepare.fallback(tmp_path, "int8") == ()


def test_a_disturbed_answer_is_measured_again(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 1e6, 2e6, 2e6])
    monkeypatch.setattr(compare, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(compare, "cpu_of_children", lambda contestants: 0.0)
    monkeypatch.setattr(compare, "sleep", lambda seconds: None)
    entry = {"name": "a", "runtime": "a", "settings": {}}
    contestant = compare.Contestant(entry, FakeWorker([1], [9.0, 1.0]))
    answer, share = compare.undisturbed([contestant], contestant, [0], compare.Limits(1, ()))
    assert (answer["seconds"], share) == (1.0, 0.0)


def test_the_draft_is_put_beside_the_target_without_copying_weights(prepare: ModuleType, tmp_path: Path) -> None:
    for name, layers in (("big-int8", 6), ("small-int8", 3)):
        folder = tmp_path / "onnxruntime" / name
        folder.mkdir(parents=True)
        config = {"model": {"decoder": {"filename": "model.onnx", "num_hidden_layers": layers}}}
        (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.onnx.data").write_bytes(name.encode())
    prepare.compose_onnxruntime(tmp_path, Path("big"), Path("small"), "int8")
    made = tmp_path / "onnxruntime" / "big-int8+small"
    model = json.loads((made / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert model["decoder"] == {"filename": "target/model.onnx", "num_hidden_layers": 6}
    assert model["draft"] == {"filename": "draft/model.onnx", "num_hidden_layers": 3}
    assert (made / "draft" / "model.onnx.data").samefile(tmp_path / "onnxruntime" / "small-int8" / "model.onnx.data")
