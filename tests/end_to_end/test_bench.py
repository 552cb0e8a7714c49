"""`mirrorsd bench` on the tiny bundle: answers, an end in the middle, other settings, the page in a browser."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mirrorsd import GenerationResult, MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.cli.bench import entrants

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
TURNS = ("Every morning the fox", "And then?")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight questions of two tasks; those of the first have two turns."""
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    lines = [
        {"question_id": 81 + number, "category": "writing", "turns": [f"{TURNS[0]} {number}", TURNS[1]]}
        if number % 2
        else {"question_id": 81 + number, "category": "rag", "turns": [f"{number} {TURNS[0]}"], "reference": ["x"]}
        for number in range(8)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def command(bundle: Path, questions: Path, out: Path, *more: str) -> list[str]:
    words = ["bench", str(bundle), str(questions), "--out", str(out), "--methods", "plain,mirror,auto"]
    return [*words, "--runs", "1", "--max-tokens", str(NUM_TOKENS), "--device-map", "cpu", *more]


@pytest.fixture(scope="module")
def measured(tiny_bundle: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "results"
    assert run(command(tiny_bundle, questions, out, "--limit", "2", "--ignore-eos")) == 0
    return out


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_method_has_a_file_of_the_same_texts_and_plain_steps_of_one(measured: Path) -> None:
    found = {path.stem: read(path) for path in (measured / "run-1").glob("*.jsonl")}
    assert set(found) == {"plain", "mirror", "auto"}
    texts = {name: [line["choices"][0]["tokens"] for line in lines] for name, lines in found.items()}
    assert texts["plain"] == texts["mirror"] == texts["auto"]
    ids = [line["question_id"] for line in found["plain"]]
    assert ids == sorted(ids)
    assert [sum(number % 2 == kind for number in ids) for kind in (0, 1)] == [2, 2]
    for name, lines in found.items():
        for line in lines:
            choice = line["choices"][0]
            num_turns = 1 if line["category"] == "rag" else 2
            assert len(choice["turns"]) == len(choice["wall_time"]) == num_turns
            assert choice["new_tokens"] == [NUM_TOKENS] * num_turns
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            if name == "plain":
                assert set(choice["accept_lengths"]) == {1}
            for wall, prefill, first, ends in zip(
                *(choice[key] for key in ("wall_time", "prefill_s", "ttft_s", "step_ends_s")), strict=True
            ):
                assert 0 < prefill < first <= wall
                assert ends == sorted(ends)
                assert ends[-1] == pytest.approx(wall, abs=1e-4)
    assert sum(found["mirror"][0]["choices"][0]["decoding_steps"]) < NUM_TOKENS


def test_nothing_of_a_prompt_is_found_in_a_cache(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[GenerationResult] = []
    monkeypatch.setattr(entrants, "as_answer", results.append)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        ids = pipe.tokenizer.encode("Every morning the fox went to the river")
        for method in ("plain", "mirror"):
            entrant = entrants.OwnMethod(pipe, method, 0.0, ignore_eos=True)
            for _ in range(2):
                entrant.answer(ids, most=4, seed=None)
    assert [result.stats.num_reused_tokens for result in results] == [0, 0, 0, 0]


def test_the_summary_and_the_page_are_there_with_a_timeline(measured: Path) -> None:
    summary = json.loads((measured / "summary.json").read_text(encoding="utf-8"))
    assert summary["identical"]
    assert {row["task"] for row in summary["rows"]} == {"rag", "mt_bench", "all"}
    assert all(row["over_plain"] > 0 for row in summary["rows"])
    page = (measured / "report.html").read_text(encoding="utf-8")
    assert page.index("What the devices did: mirror") < page.index("What the devices did: auto")


HALTING = """
import sys, time
from pathlib import Path
from mirrorsd.cli.application import run
from mirrorsd.cli.bench import entrants

answer = entrants.OwnMethod.answer

def halting(*arguments, **options):
    while sum(len(path.read_text().splitlines()) for path in Path(sys.argv[1]).glob("run-1/*.jsonl")) >= 3:
        time.sleep(1)
    return answer(*arguments, **options)

entrants.OwnMethod.answer = halting
sys.exit(run(sys.argv[2:]))
"""
"""The command, which asks for no more once three answers have been written."""


def test_a_killed_run_goes_on_with_what_is_missing(tiny_bundle: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = command(tiny_bundle, questions, out, "--ignore-eos")
    with subprocess.Popen([sys.executable, "-c", HALTING, str(out), *words], stderr=subprocess.DEVNULL) as child:
        try:
            wait_until(
                lambda: sum(path.read_bytes().count(b"\n") for path in out.glob("run-1/*.jsonl")) >= 3, "no answers"
            )
        finally:
            child.send_signal(signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
    before = {line["answer_id"] for path in out.glob("run-1/*.jsonl") for line in read(path)}
    assert 3 <= len(before) < 24
    assert not (out / "summary.json").exists()
    assert run(words) == 0
    after = [line["answer_id"] for path in out.glob("run-1/*.jsonl") for line in read(path)]
    assert len(after) == len(set(after)) == 24
    assert before <= set(after), "what was there stays as it was"
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["identical"]


def test_a_folder_that_was_measured_otherwise_is_refused(
    measured: Path, tiny_bundle: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in measured.rglob("*") if path.is_file()}
    assert run(command(tiny_bundle, questions, measured, "--limit", "2", "--ignore-eos", "--temperature", "1")) == 2
    assert "measured with temperature = 0.0; this run has 1.0" in capsys.readouterr().err
    assert run(command(tiny_bundle, questions, measured, "--limit", "2")) == 2
    assert 'measured with ends = "ignored"; this run has "honoured"' in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in measured.rglob("*") if path.is_file()}


def test_a_text_that_differs_is_an_error_that_names_the_question(
    measured: Path, tiny_bundle: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    shutil.copytree(measured, out)
    path = out / "run-1" / "auto.jsonl"
    lines = read(path)
    lines[-1]["choices"][0]["tokens"][0][3] += 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert run(command(tiny_bundle, questions, out, "--limit", "2", "--ignore-eos")) == 1
    printed = capsys.readouterr()
    assert f"question {lines[-1]['question_id']}, run 1, turn 1: auto differs from plain at token 3" in printed.err
    assert "1 texts are NOT identical." in printed.out


def test_sampled_texts_are_the_same_by_every_method_and_others_in_every_run(
    tiny_bundle: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    words = command(tiny_bundle, questions, out, "--limit", "1", "--temperature", "1", "--runs", "2", "--seed", "5")
    assert run(words) == 0
    assert "±" in (out / "report.html").read_text(encoding="utf-8")
    texts = [read(out / f"run-{number}" / "plain.jsonl")[0]["choices"][0] for number in (1, 2)]
    assert [choice["seed"] for choice in texts] == [5, 6]
    assert texts[0]["tokens"] != texts[1]["tokens"]


@pytest.mark.parametrize("words", [["--temperature", "-1"], ["--methods", "medusa"], ["--seed", str(2**64 - 1)]])
def test_what_is_refused_leaves_no_settings(
    tiny_bundle: Path, questions: Path, tmp_path: Path, words: list[str]
) -> None:
    """The last seed of the three runs is one too many."""
    out = tmp_path / "results"
    assert run(command(tiny_bundle, questions, out, "--temperature", "1", "--runs", "3", *words)) == 2
    assert not list(out.rglob("*.json*"))


def test_a_place_that_is_none_and_a_peer_that_is_none_are_refused(
    tiny_bundle: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(tiny_bundle, questions, tmp_path / "a" / "b")) == 2
    assert "is no place for a folder" in capsys.readouterr().err
    peer = f"openvino-genai={sys.executable}{os.pathsep}{tmp_path}"
    assert run(command(tiny_bundle, questions, tmp_path / "c", "--peer", peer, "--temperature", "1")) == 2
    assert "--peer decodes greedily" in capsys.readouterr().err
    assert run(command(tiny_bundle, questions, tmp_path / "c", "--peer", f"vllm={peer}")) == 2
    assert "there are openvino-genai, onnxruntime-genai" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_a_complaint_and_asks_nobody(measured: Path, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    page_file = (measured / "report.html").as_uri()
    complaints: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_context(color_scheme=scheme, viewport={"width": 700, "height": 800}).new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file)
        bars = page.locator("svg.chart rect.c0")
        assert bars.count() > 0
        assert bars.first.bounding_box()["height"] > 1
        assert page.locator("svg.m").count() == 2
        wide = page.evaluate("document.documentElement.scrollWidth")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.close()
    assert complaints == []
    assert [url for url in requests if url.startswith("http")] == []
    assert wide <= 700, "what is wide scrolls by itself"
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 23, 29)"}[scheme]
