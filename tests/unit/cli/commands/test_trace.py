"""Traces: written by a generation, read back, drawn."""

import json
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
    about = {"plain_tokens_per_second": 100.0}
    title = "mirrorsd mirror on cpu"
    write_trace(tmp_path / "trace.json", SPANS, STEPS, title=title, texts=["a little fox"], about=about)
    return tmp_path / "trace.json"


def test_figures_are_those_of_the_spans(trace_file: Path) -> None:
    recorded = read_trace(trace_file)
    assert recorded.length_ms == pytest.approx(26.0)
    assert recorded.figures() == [
        "4 tokens in 1 passes of the target, 26 ms",
        "plain decoding would have said 2 by then",
        "75% of the draft's work cost no time, beside the target's",
        "the target waited for the draft 19% of the time",
    ]


def test_a_picture_does_not_take_the_place_of_its_trace(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = trace_file.rename(trace_file.with_suffix(".html"))
    assert run(["trace", str(named)]) == 2
    assert "give the picture another name" in capsys.readouterr().err
    assert read_trace(named).length_ms > 0


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_pictures_are_drawn_by_one_hand(trace_file: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"out.{ending}"
    assert run(["trace", str(trace_file), "-o", str(picture), "--start-ms", "0"]) == 0
    content = picture.read_text(encoding="utf-8")
    assert content.startswith("<svg" if ending == "svg" else "<!doctype html>")
    assert "a little fox" in content
    assert "3 of 4 right" in content
    assert "plain decoding" in content
    assert ('id="in"' in content) == (ending == "html"), "only the page can be zoomed"


def test_the_picture_goes_beside_the_trace_by_default(trace_file: Path) -> None:
    assert run(["trace", str(trace_file)]) == 0
    assert trace_file.with_suffix(".html").is_file()


def test_a_trace_without_words_and_speeds_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    write_trace(tmp_path / "old.json", SPANS, STEPS, title="old")
    document = json.loads((tmp_path / "old.json").read_text(encoding="utf-8"))
    del document["otherData"]
    (tmp_path / "old.json").write_text(json.dumps(document), encoding="utf-8")
    assert run(["trace", str(tmp_path / "old.json"), "-o", str(tmp_path / "old.svg"), "--start-ms", "0"]) == 0
    assert "plain decoding" not in (tmp_path / "old.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "-o", "x.html"], "cannot be read"),
        ([""], "cannot be read"),
        ([".", "-o", "x.html"], "cannot be read"),
        (["TRACE", "-o", "x.html", "--start-ms", "nan"], "the trace ends after 26.0 ms"),
        (["TRACE", "-o", "x.gif"], "ends in .html or .svg"),
        (["TRACE", "-o", "nowhere/x.svg"], "there is no folder nowhere"),
        (["TRACE", "-o", f"{'x' * 300}.html"], "cannot be written: "),
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
