"""Traces: written by a generation, read back, drawn."""

from pathlib import Path

import pytest

from mirrorsd.cli.application import run
from mirrorsd.cli.output.trace_picture import read_trace
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.trace import write_trace

SPANS = (
    Span("target", "prefix", 10.000, 10.010),
    Span("target", "suffix", 10.010, 10.020),
    Span("draft", "expand", 10.005, 10.025),
    Span("host", "exposed", 10.020, 10.025),
)
STEPS = (StepRecord(10.0, 10.026, 4, 3, "late", "mirror", 0.026),)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.json", SPANS, STEPS, title="mirrorsd mirror on cpu")
    return tmp_path / "trace.json"


def test_figures_are_those_of_the_spans(trace_file: Path) -> None:
    recorded = read_trace(trace_file)
    assert recorded.length_ms == pytest.approx(26.0)
    assert recorded.figures() == [
        "1 steps in 26.0 ms",
        "3.00 tokens accepted per step",
        "75 % of the branch rounds beside the target",
        "19 % of the time waiting for the draft",
    ]


@pytest.mark.parametrize("ending", ["html", "png"])
def test_pictures_are_drawn(trace_file: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"out.{ending}"
    assert run(["trace", str(trace_file), "-o", str(picture), "--start-ms", "0"]) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<!doctype html>")
    if ending == "html":
        assert b"3 of 4, next: late" in content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "-o", "x.html"], "cannot be read"),
        (["TRACE", "-o", "x.gif"], "ends in .html or .png"),
        (["TRACE", "-o", "x.html", "--start-ms", "99"], "the trace ends after 26.0 ms"),
    ],
)
def test_bad_input(trace_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", *(str(trace_file) if word == "TRACE" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("[1, 2]", encoding="utf-8")
    assert run(["trace", str(tmp_path / "other.json"), "-o", str(tmp_path / "x.html")]) == 2
    assert "is not a trace" in capsys.readouterr().err
