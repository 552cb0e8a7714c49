"""The command that measures every method of a bundle, on the tiny target with two heads."""

import json
import sys
from pathlib import Path

import pytest
from random_heads import HEADS

from mirrorsd.bench.claims import methods
from mirrorsd.graphs.names import HEAD_KINDS

QUESTIONS = (
    {"question_id": 1, "category": "qa", "turns": ["Why is the sky blue?", "And at night?"]},
    {"question_id": 2, "category": "rag", "turns": ["Once upon a time"]},
)
PLACES = (methods.REAL, methods.PACED, methods.SIMULATED)


def test_all_methods_in_one_table(
    headed_bundle: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, card = tmp_path / "questions.jsonl", tmp_path / "quick.toml"
    questions.write_text("".join(f"{json.dumps(question)}\n" for question in QUESTIONS), encoding="utf-8")
    card.write_text(
        "[target]\nthreads = 1\n[draft]\nthreads = 1\n[speculation]\nwindow = 'full'\n"
        "[pace]\ntarget_ms = [[1, 2.0], [8, 2.5]]\ndraft_ms = [[1, 0.5]]\nexit_ms = 0.05\n",
        encoding="utf-8",
    )
    words = [str(headed_bundle[0]), "--work", str(tmp_path / "work"), "--prompts", str(questions), "--tokens", "16"]
    words += ["--paced-map", str(card), "--ignore-eos", "--output", str(tmp_path / "table.json")]
    monkeypatch.setattr(sys, "argv", ["methods.py", *words])
    assert methods.main() == 0
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["identical"]
    assert report["absent"] == [kind for kind in HEAD_KINDS if kind not in HEADS]
    assert report["methods"]["medusa"]["parameters"] == 12480
    assert report["methods"]["lookup"]["parameters"] == 0
    rows = {(row["temperature"], row["task"], row["method"]): row for row in report["rows"]}
    assert set(rows) == {(t, task, m) for t in (0, 1) for task in ("qa", "rag", "all") for m in report["methods"]}
    for row in rows.values():
        assert all(row[place]["over_plain"] > 0 for place in PLACES)
    for method in ("plain", "lookup", "medusa", "eagle3"):
        found = rows[1, "all", method]
        same = [found[place]["tokens_per_step"] for place in PLACES]
        assert same == pytest.approx([same[0]] * 3), method
    answers = (tmp_path / "work" / "temperature-1" / "paced" / "run-1" / "medusa.jsonl").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--temperatures", "1"])
    assert methods.main() == 0
    assert (tmp_path / "work" / "temperature-1" / "paced" / "run-1" / "medusa.jsonl").read_text() == answers
