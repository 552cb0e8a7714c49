import doctest

import pytest
from rich.table import Table

from mirrorsd.cli.output import console


def test_docstring_examples() -> None:
    assert doctest.testmod(console).failed == 0


def test_a_pipe_gets_a_line_per_stage_and_one_every_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr(console, "perf_counter", lambda: clock)
    with console.show_share("exporting") as show:
        for second, stage, fraction in (
            (0, "check", 0.0),
            (10, "prefix", 0.1),
            (20, "prefix", 0.2),
            (45, "prefix", 0.5),
        ):
            clock = float(second)
            show(stage, fraction)
    assert capsys.readouterr().err.splitlines() == [
        "exporting (0%): check",
        "exporting (10%, about 2 min left): prefix",
        "exporting (50%, about 45 s left): prefix",
    ]


def test_names_of_a_bundle_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    console.add_row(table, "model\x1b[2J\x9b")
    console.print_table(table)
    console.note("reads model\x1b]0;title\x07")
    console.note_error("no model\x1b[2J")
    printed = "".join(capsys.readouterr())
    assert not {"\x1b", "\x9b", "\x07"} & set(printed)
    assert printed.count(r"model\x1b") == 3


@pytest.mark.parametrize(("width", "left_out"), [(100, ""), (36, "waiting"), (26, "draft right, waiting")])
def test_a_table_of_numbers_loses_whole_columns_and_says_so(
    width: int, left_out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    titles = ("method", "tokens/s", "draft right", "waiting")
    table = Table(*titles)
    table.add_row("serial", "1215.3", "33%", "11.5 ms")
    console.print_figures(table)
    out, err = capsys.readouterr()
    assert err == (f"left out, as they do not fit into {width} columns: {left_out}\n" if left_out else "")
    kept = [title for title in titles if title not in left_out.split(", ")]
    assert all(word in out for title in kept for word in title.split())
    assert {"1215.3" in out, "\u2026" in out, "11.5 ms" in out} == {True, False, "waiting" in kept}


def test_a_narrow_table_loses_no_letter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    table = Table("file", "size")
    console.add_row(table, "target/a_very_long_name_of_a_stage.onnx [cuda]", "12.5 MiB")
    console.print_table(table)
    letters = "".join(c for c in capsys.readouterr().out if c.isalnum())
    assert "".join(c for c in "a_very_long_name" if c.isalnum()) in letters.replace("125MiB", "")
    assert "cuda" in letters
