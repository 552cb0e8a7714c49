"""What is done before a pipeline is loaded, and what its chat advises."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.cli.application import application, run
from mirrorsd.cli.bench import measuring
from mirrorsd.cli.bench.running import Plan
from mirrorsd.cli.chat.in_process import InProcess
from mirrorsd.cli.commands import bench
from mirrorsd.cli.commands.loading import check_fits, first_turns
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.cli.input.requests import Request
from mirrorsd.cli.output import console
from mirrorsd.devices import layouts
from mirrorsd.devices.layouts import Cores
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, ContextLengthError


def test_what_is_wrong_with_a_manifest_is_for_loading_to_say(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff{}")
    check_fits(tmp_path, Request(prompt="Once"))


def test_a_chat_advises_what_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe: Any = SimpleNamespace(advice="`mirrorsd tune BUNDLE` looks for more")
    answers = InProcess(pipe, Path("my pairs/story.mirror"))
    assert answers.advice == "`mirrorsd tune 'my pairs/story.mirror'` looks for more"
    assert answers.name == "story"
    monkeypatch.setattr(console, "os", SimpleNamespace(name="nt"))
    assert answers.advice.partition(" tune ")[2].startswith('"my pairs'), "Windows knows no single quotes"


def test_a_chat_takes_no_method_without_its_head(bundle: Path) -> None:
    pipe: Any = SimpleNamespace(manifest=read_bundle(bundle), methods=("plain", "auto"))
    InProcess(pipe, bundle).check_method("plain")
    with pytest.raises(ConfigError, match=r"method is 'eagle3'; this bundle has no such head"):
        InProcess(pipe, bundle).check_method("eagle3")


def test_a_system_prompt_that_is_no_text_is_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", str(bundle), "--system", "caf\udce9"]) == 2
    assert "--system is not text (a byte that is not UTF-8 at character 3)" in capsys.readouterr().err


def test_a_question_that_is_too_long_is_left_out_and_said(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle holds 64 tokens; one of a text and one of a window must fit behind a question."""
    words = SimpleNamespace(encode=str.split)
    monkeypatch.setattr("mirrorsd.texts.tokenizer.BundleTokenizer", lambda *_: words)
    questions = [
        Question(question_id=length, category="a", turns=("word " * length, "x " * 99)) for length in (3, 62, 63)
    ]
    assert [len(words.encode(str(text))) for text in first_turns(bundle, questions)] == [3, 62]
    assert "1 of 3 questions do not fit into the context of 64 tokens, and are left out" in capsys.readouterr().err
    with pytest.raises(ContextLengthError, match="No question fits into the bundle's context of 64 tokens"):
        first_turns(bundle, questions[2:])


def test_other_runtimes_get_the_cores_that_this_process_may_use(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's share, and not all that its machine has."""

    def measure(_: object, __: Path, plan: Plan, *___: object) -> None:
        raise ConfigError(f"{plan.threads} threads")

    monkeypatch.setattr(layouts, "usable_cores", lambda: Cores((), 3))
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(bench, "open_pipeline", lambda *_, **__: nullcontext())
    questions, out = tmp_path / "q.jsonl", tmp_path / "out"
    questions.write_text('{"question_id": 1, "category": "qa", "turns": ["Why?"]}', encoding="utf-8")
    for given, number in (((), 3), (("--threads", "5"), 5)):
        with pytest.raises(ConfigError, match=f"{number} threads"):
            application("bench")(["bench", str(bundle), str(questions), "-o", str(out), *given], standalone_mode=False)
