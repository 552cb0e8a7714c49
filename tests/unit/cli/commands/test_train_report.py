"""The tables of `train report` say in words what their columns and rows are."""

from typing import Any

import pytest

from mirrorsd.cli.commands.train.report import print_report


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
