"""The comparison with other runtimes, without them: what it makes of turns and answers."""

import argparse
import doctest
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mirrorsd.bench.claims.peers import table, turns, users, ways
from mirrorsd.bench.claims.peers.journal import Journal
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.errors import GenerationError

FOLDER = Path(__file__).resolve().parents[3] / "bench" / "claims" / "peers"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("compare")


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


def answered(name: str, texts: dict[str, tuple[list[int], list[float]]]) -> table.Done:
    """A contestant that is done: by prompt its text (all ended after it) and seconds per repeat."""
    answers = {
        prompt: [{"ids": ids, "num_tokens": len(ids) + 1, "seconds": each, "passes": 2} for each in seconds]
        for prompt, (ids, seconds) in texts.items()
    }
    return table.Done(name, name.split()[0], answers)


def test_a_row_is_the_mean_of_the_tasks_and_a_task_its_tokens_over_their_time() -> None:
    first = answered("a plain", {"p": ([1, 2, 3], [1.0]), "q": ([1], [1.0]), "r": ([5], [1.0])})
    second = answered("b plain", {"p": ([1, 2, 9], [0.5, 4.0, 0.5]), "q": ([1], [2.5]), "r": ([5], [1.0])})
    tasks = {"p": "sums", "q": "sums", "r": "story"}
    row = table.row(second, first, tasks)
    assert row["by_task"] == {"sums": (4 + 2) / (0.5 + 2.5), "story": 2.0}
    assert row["tokens_per_second"] == 2.0
    assert row["tokens_per_pass"] == round((3 * 4 + 2 + 2) / 10, 3)
    assert (row["same_text"], row["first_difference_at"]) == (2, [2])
    assert (row["num_tokens"], row["seconds"]["p"]) == ({"p": 4, "q": 2, "r": 2}, [0.5, 4.0, 0.5])


def test_the_best_of_each_runtime_counts(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"mirrorsd plain": 5.0, "mirrorsd auto": 9.0, "peer draft 2": 4.0, "peer draft 8": 6.0}
    rows = [
        {"name": name, "runtime": name.split()[0], "tokens_per_second": speed, "tokens_per_pass": None}
        | {"same_text": 1, "by_task": {"sums": speed}}
        for name, speed in speeds.items()
    ]
    best = table.best_of_each(rows)
    assert best["peer"] == {"name": "peer draft 8", "tokens_per_second": 6.0, "auto_to_it": 1.5}
    report = {"precision": "fp32", "answered": ["p"], "tokens": 9, "threads": 2, "ends": "honoured", "too_long": 3}
    report |= {"temperature": 0.5, "processor": "a chip", "refused": {"peer draft 4": "no such file\nat all"}}
    over = {"peer": {"name": "peer draft 8", "ratio": 1.5, "interval": [1.25, 2.0]}}
    quality = {"peer": {"kept": 0.9531, "perplexity": 0.011}}
    table.print_table(report | {"rows": rows, "over": over, "quality": quality, "disturbed": []})
    printed = capsys.readouterr().out
    assert "T = 0.5, end of text honoured, 3 questions too long for the bundle; a chip" in printed
    assert "auto over peer: 1.500 (1.250 to 2.000), peer draft 8" in printed
    assert "peer keeps 95.3% of the best tokens, perplexity +1.1%" in printed
    assert "peer draft 4 took no part: no such file\n" in printed


def test_auto_is_held_against_the_way_that_is_a_peer_s_best_and_by_task_that_task_s() -> None:
    texts = {"p": ([1, 2, 3], 4.0), "q": ([1, 2, 3], 1.0)}
    done = [
        answered(name, {prompt: (ids, [seconds * factor[prompt]]) for prompt, (ids, seconds) in texts.items()})
        for name, factor in {
            "mirrorsd plain": {"p": 1.0, "q": 1.0},
            "mirrorsd auto": {"p": 0.5, "q": 0.5},
            "peer plain": {"p": 1.0, "q": 1.0},
            "peer draft 2": {"p": 2.0, "q": 0.25},
        }.items()
    ]
    tasks = {"p": "write", "q": "edit"}
    rows = [table.row(one, done[0], tasks) for one in done]
    over = table.over_peers(done, rows, tasks)
    assert over["peer"] == over["best peer"]
    assert over["best peer"]["name"] == "peer draft 2"
    assert over["best peer"]["ratio"] == round((4 / 2 + 4 / 0.5) / (4 / 8 + 4 / 0.25), 3)
    assert (over["best peer, write"]["name"], over["best peer, write"]["ratio"]) == ("peer plain", 2.0)
    assert (over["best peer, edit"]["name"], over["best peer, edit"]["ratio"]) == ("peer draft 2", 0.5)
    low, high = over["best peer"]["interval"]
    assert low <= over["best peer"]["ratio"] <= high, "texts of the same task are drawn, one of each here"
    assert table.over_peers(done[:2], rows[:2], tasks) == {}


def test_an_interval_is_as_wide_as_the_texts_differ() -> None:
    tasks = {str(number): "sums" for number in range(9)}
    seconds = {name: (0.5 if int(name) % 3 else 2.0) for name in tasks}
    own = answered("mirrorsd auto", {name: ([1], [seconds[name]]) for name in tasks})
    other = answered("peer plain", {name: ([1], [1.0]) for name in tasks})
    found = table.ratio(own, other, tasks)
    assert found["ratio"] == 1.0
    low, high = found["interval"]
    assert low < 0.8 and high > 1.2
    even = table.ratio(other, other, tasks)
    assert even["interval"] == [1.0, 1.0]


def test_a_journal_goes_on_where_it_ended_and_only_with_the_same_settings(tmp_path: Path) -> None:
    path, settings = tmp_path / "journal.jsonl", {"tokens": 9, "prompts": ("p", "q")}
    first = Journal(path, settings)
    first.add("peer plain", "p", {"ids": [4], "seconds": 1.5})
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"contestant": "peer plain", "prompt": "q", "ans')
    again = Journal(path, settings)
    assert again.of("peer plain", "p") == [{"ids": [4], "seconds": 1.5}]
    assert again.of("peer plain", "q") == [] == again.of("other", "p")
    with pytest.raises(SystemExit, match="was measured with other settings: tokens"):
        Journal(path, settings | {"tokens": 8})
    with pytest.raises(SystemExit, match="was measured with other settings: prompts, seed"):
        Journal(path, {"tokens": 9, "prompts": ["p"], "seed": 1})


class FakeCompany:
    """Contestants whose workers answer at once."""

    def __init__(self, *workers: Any) -> None:
        entries = [{"name": f"peer {n}", "runtime": "peer", "settings": {}} for n in range(len(workers))]
        pairs = zip(entries, workers, strict=True)
        self.contestants = [turns.Contestant(entry, worker) for entry, worker in pairs]
        self.refused: dict[str, str] = {}

    leave_out: Any = turns.Company.leave_out


def company_of(*workers: Any) -> Any:
    return FakeCompany(*workers)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "undisturbed", lambda contestants, decode: decode() | {"share": 0.0})


@pytest.mark.usefixtures("undisturbed")
def test_what_the_journal_holds_is_not_asked_again_and_no_prompt_begins_when_time_is_over() -> None:
    workers = [FakeWorker([4, 5], [1.0] * 9) for _ in range(2)]
    journal, prompts = Journal(None, {}), {"p": [7], "q": [8]}
    journal.add("peer 0", "p", {"ids": [4]})
    turns.measure(company_of(*workers), prompts, turns.Limits(2, (9,)), journal, 1, 0.0)
    assert [len(worker.requests) for worker in workers] == [1, 1], "a first text that nobody counts"
    turns.measure(company_of(*workers), prompts, turns.Limits(2, (9,)), journal, 1, 1.0)
    asked = [[request["ids"] for request in worker.requests[2:]] for worker in workers]
    assert asked == [[[8]], [[7], [8]]]
    assert {prompt: len(found) for prompt, found in journal.answers["peer 1"].items()} == {"p": 1, "q": 1}


class BrokenWorker:
    """A process that has ended."""

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        raise GenerationError("it ended")


@pytest.mark.usefixtures("undisturbed")
def test_a_contestant_that_fails_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    company, journal = company_of(BrokenWorker(), FakeWorker([4], [1.0] * 9)), Journal(None, {})
    turns.measure(company, {"p": [7]}, turns.Limits(1, ()), journal, 1, 1.0)
    assert company.refused == {"peer 0": "it ended"}
    assert list(journal.answers) == ["peer 1"]
    assert "peer 0 is left out: it ended" in capsys.readouterr().err


def test_several_users_figures_are_medians_of_rounds_and_ours_are_compared_with_one_user_s() -> None:
    journal = Journal(None, {})
    names = {"mirrorsd auto": "mirrorsd", "peer plain": "peer"}
    for name, speeds in {"mirrorsd auto": (2.0, 4.0, 8.0), "peer plain": (1.0, 2.0, 4.0)}.items():
        for number in ("1", "4"):
            for seconds in speeds:
                ids = [5] if (number, seconds) == ("4", 8.0) else [4]
                texts = [{"ids": ids, "num_tokens": 8}]
                journal.add(name, number, {"seconds": seconds, "texts": texts, "share": 0.1})
    found = users.results_of(journal, names, [1, 4])
    rows = {(row["name"], row["users"]): row for row in found["rows"]}
    assert rows["peer plain", 4]["tokens_per_second"] == 4.0
    assert (rows["mirrorsd auto", 1]["least"], rows["mirrorsd auto", 1]["most"]) == (1.0, 4.0)
    pair = {"mirrorsd auto / peer plain": 0.5}
    assert found["over"] == {"1 users": pair, "4 users": pair}, "each of our ways by itself"
    assert found["different"] == 1


def test_several_texts_are_asked_with_one_line_and_answered_with_the_time_of_all(worker: ModuleType) -> None:
    class Runtime:
        def decode_several(self, asked: list[Any], users: int) -> list[Any]:
            return [worker.Decoded([7, 2], None) for _ in asked[:users]]

    one = {"ids": [5], "most": 4, "ends": [2], "settings": {}}
    found = worker.answer_to(Runtime(), {"several": [one, one], "users": 2})
    assert found["texts"] == [{"ids": [7], "num_tokens": 2}] * 2
    assert found["seconds"] >= 0.0


def test_users_of_ours_have_a_session_each_and_a_prompt_is_answered_by_whoever_is_free(
    worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[FakeSession] = []

    def session() -> FakeSession:
        sessions.append(FakeSession())
        return sessions[-1]

    pipe = SimpleNamespace(session=session)
    monkeypatch.setattr("mirrorsd.MirrorPipeline", SimpleNamespace(load=lambda *words, **settings: pipe))
    runtime = worker.Mirrorsd(Path("b"), None, 2, {"device_map": "cpu"})
    asked = [worker.Asked(ids=[number], most=4, ends=[], settings={"method": "auto"}) for number in range(4)]
    assert [found.ids for found in runtime.decode_several(asked, 2)] == [[4]] * 4
    assert len(sessions) == 2
    assert sorted(ids[0] for session in sessions for ids in session.read if ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("draft", ["small", None])
def test_peers_draft_several_numbers_of_tokens_in_one_process_per_model(draft: str | None) -> None:
    words = {"target": "big", "draft": draft, "precision": "int8", "draft_precisions": None, "drafted": "2,12"}
    options = argparse.Namespace(**words, cache=Path("c"), bundle=Path("b"), device_map="cpu", llama_cpp=None)
    found = ways.entries(options)
    drafting = {entry["name"]: entry["settings"] for entry in found if "num_drafted" in entry["settings"]}
    assert {settings["num_drafted"] for settings in drafting.values()} == {2, 12}
    by_draft = {"openvino-genai draft", "onnxruntime-genai draft"} if draft else set()
    assert {name.rsplit(" ", 1)[0] for name in drafting} == {"openvino-genai prompt lookup", *by_draft}
    ours = [entry["settings"]["method"] for entry in found if entry["runtime"] == "mirrorsd"]
    assert ours == (["plain", "lookup", "serial", "auto"] if draft else ["plain", "lookup", "auto"])
    keys = {json.dumps([e["runtime"], e["model"], e.get("draft"), e["options"]]) for e in found}
    assert len(keys) == (7 if draft else 5)


def test_llama_cpp_takes_part_with_a_server_per_way_to_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = SimpleNamespace(target=SimpleNamespace(context=256))
    monkeypatch.setattr(ways, "read_bundle", lambda folder: bundle)
    (tmp_path / "llama-server").touch()
    words = {"target": "big", "draft": "small", "precision": "int4", "drafted": "2,8", "llama_cpp": str(tmp_path)}
    found = ways.entries_of_llama_cpp(argparse.Namespace(**words, cache=tmp_path, bundle=Path("b")))
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
    for_users = argparse.Namespace(**words, cache=tmp_path, bundle=Path("b"), most_users=8, methods="plain,auto")
    for_users.device_map = "cpu"
    served = {each["name"]: each["options"] for each in ways.entries_for_users(for_users)}
    assert served["llama.cpp --parallel"] == server | {"most_users": 8}
    assert served["openvino-genai continuous batching"] == {"most_users": 8}
    assert [name for name in served if name.startswith("mirrorsd")] == ["mirrorsd plain", "mirrorsd auto"]


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="only Linux tells what a process has used")
def test_what_a_worker_starts_counts_as_its_own_use_of_the_processor() -> None:
    child = "while True: pass"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    contestant: Any = SimpleNamespace(worker=SimpleNamespace(pid=process.pid))
    used, deadline = 0.0, monotonic() + 30
    while used < 0.5 and monotonic() < deadline:
        used = turns.cpu_of_children([contestant])
        sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert used >= 0.5


def test_a_request_names_the_ends_and_its_own_settings() -> None:
    worker: Any = FakeWorker([4, 5], [1.0, 1.0])
    entry = {"name": "peer draft 3", "runtime": "peer", "settings": {"num_drafted": 3}}
    contestant = turns.Contestant(entry, worker)
    contestant.decode([7], turns.Limits(9, (2,)))
    contestant.decode([7], turns.Limits(9, (2,), 0.8, 5))
    asked = {"ids": [7], "most": 9, "ends": [2], "settings": {"num_drafted": 3}}
    assert worker.requests == [asked, asked | {"temperature": 0.8, "seed": 5}]


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
    assert [question.question_id for question in compare.choose(questions, 2)] == [0, 1, 6, 7]


def test_the_token_that_ends_a_text_counts_whether_it_is_returned_or_not(worker: ModuleType) -> None:
    assert doctest.testmod(worker).failed == 0
    asked = worker.Asked(ids=[5], most=3, ends=[2, 9], settings={})
    assert worker.count_tokens([7, 9], asked) == worker.count_tokens([7], asked) == ([7], 2)
    assert worker.count_tokens([7, 7, 2], asked) == worker.count_tokens([7, 7], asked) == ([7, 7], 3)
    ignored = asked._replace(ends=[])
    assert worker.count_tokens([7, 2, 9], ignored) == ([7, 2, 9], 3)


def test_a_disturbed_answer_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 1e6, 2e6, 2e6])
    monkeypatch.setattr(turns, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(turns, "cpu_of_children", lambda contestants: 0.0)
    monkeypatch.setattr(turns, "sleep", lambda seconds: None)
    entry = {"name": "a", "runtime": "a", "settings": {}}
    worker: Any = FakeWorker([1], [9.0, 1.0])
    contestant = turns.Contestant(entry, worker)
    answer = turns.undisturbed([contestant], lambda: contestant.decode([0], turns.Limits(1, ())))
    assert (answer["seconds"], answer["share"]) == (1.0, 0.0)
