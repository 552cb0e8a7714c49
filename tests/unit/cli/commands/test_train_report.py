"""The tables of `train report` say in words what their columns and rows are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.cli.application import run
from mirrorsd.cli.commands.train import report, target
from mirrorsd.cli.commands.train.report import by_name, print_report


def test_every_row_and_column_has_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    by_task = {"math": {"mean_accepted": 1.5}}
    row: dict[str, Any] = {"mean_accepted": 1.5, "by_task": by_task}
    ways = {"J=1": {**row, "share_of_reference": 0.5}, "J=2": row, "main rows alone, 6 passes": row}
    shares = {"1": 0.25, "2": 0.5, "4": 0.75, "8": 1.0}
    misses = {"positions": 90, "misses": 12, "draft": shares, "exit_3": shares, "both_3": shares}
    print_report({"windows": {"reference": "main rows alone, 6 passes", **ways}, "misses": misses})
    said = capsys.readouterr().out
    for words in ("1 round ", "2 rounds", "shares are of the last row (a token a round, 6 rounds)", "50.0%"):
        assert words in said
    for words in ("wrong (12 places)", "the draft", "the exit after layer 3", "that exit or the draft", "75.0%"):
        assert words in said
    assert "J=" not in said


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a tiny target, which must not answer."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    checkpoint = SimpleNamespace(path=tmp_path, folder=tmp_path, eos_ids=(2,))
    monkeypatch.setattr(target, "open_target", lambda *_, **__: checkpoint)
    monkeypatch.setattr(target, "load_target", lambda _: LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=24)))
    monkeypatch.setattr(report, "check_speaks_like", lambda *_: None)

    def answer(*_: Any) -> Any:
        raise AssertionError("the target answers")

    monkeypatch.setattr(report, "write_answers", answer)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question_id": 1, "category": "story", "turns": ["A fox."]}))
    (tmp_path / "head").mkdir()
    return ["train", "report", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--draft", "DRAFT", "--only", "misses,speed"), "there is no section 'speed'"),
        (("--head", "{}/head"), "has no config.json"),
        (("--head", "{}/head", "-o", "{}/away/report.json"), "there is no folder"),
        (("--draft", "{}/head"), "cannot be loaded"),  # a checkpoint's fault has a status of its own
    ],
)
def test_what_cannot_be_reported_is_refused_before_the_target_answers(
    wrong: tuple[str, ...], words: str, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*asked, *(part.format(tmp_path) for part in wrong)]) in (2, 3)
    assert words in " ".join(capsys.readouterr().err.split())


def test_heads_of_one_name_are_told_apart() -> None:
    folders = [Path("a/head"), Path("b/head"), Path("b/other")]
    assert by_name(folders) == dict(zip((str(folders[0]), str(folders[1]), "other"), folders, strict=True))
