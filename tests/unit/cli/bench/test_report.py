"""The summary and the page, from answers made by hand."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from answer_lines import line

from mirrorsd.cli.bench import charts, report
from mirrorsd.cli.output.timeline import Box, Timeline

SETTINGS = {
    "bundle": "fox & <heron>.mirror",
    "questions": [1, 2],
    "methods": ["plain", "auto"],
    "runs": 1,
    "temperature": 0.0,
    "max_tokens": 64,
    "ends": "honoured",
    "device_map": "cpu",
    "card_is_paced": False,
    "machine": {"processor": "Some Processor", "cores": 2},
    "versions": {"python": "3.11.7"},
}


def windows(num_tokens: int, seconds: float, question_id: int) -> dict[str, Any]:
    """An answer in steps of two: of two tokens in each window, one was right."""
    half = num_tokens // 2
    found = line(question_id, num_tokens, seconds, accept_lengths=[2] * half, window_lengths=[[2] * half])
    found["choices"][0]["step_ends_s"] = [found["choices"][0]["step_ends_s"][0][1::2]]
    return found


def runs() -> dict[str, list[list[dict[str, Any]]]]:
    return {
        "plain": [[line(1, 24, 2.0), line(2, 24, 3.0)]],
        "auto": [[windows(24, 1.0, 1), windows(24, 2.0, 2)]],
    }


def timeline() -> Timeline:
    boxes = tuple(
        box
        for start in range(0, 40, 4)
        for box in (
            Box("text", "step", start, start + 4, {"window": 2, "accepted": 1, "text": "a <fox>"}),
            Box("target", "prefix", start, start + 2, {}),
            Box("draft", "expand", start, start + 1, {}),
        )
    )
    return Timeline("auto", boxes, 0.0, 40.0)


def test_the_summary_has_rows_points_and_whether_the_texts_are_the_same() -> None:
    found = report.summary(SETTINGS, runs(), ["plain", "auto"], 3)
    assert (found["identical"], found["differences"], found["left_out"]) == (True, [], 3)
    assert [(row["task"], row["method"]) for row in found["rows"]] == [
        *(("rag", "plain"), ("rag", "auto"), ("all", "plain"), ("all", "auto"))
    ]
    assert found["rows"][1]["accepted_at"] == [1.0, 0.0]
    assert len(found["questions"]) == 4
    json.dumps(found)


def test_other_runtimes_may_write_other_texts() -> None:
    answers = runs() | {"peer": [[line(1, 24, 2.0, tokens=[[5] * 24]), line(2, 24, 3.0)]]}
    found = report.summary(SETTINGS, answers, ["plain", "auto"], 0)
    assert found["identical"]
    assert found["other_texts"] == {"peer": 1}
    assert "peer: 1 texts are others than ours." in report.page(found, {})


def test_a_difference_is_on_the_page_with_its_question() -> None:
    answers = runs()
    answers["auto"][0][1]["choices"][0]["tokens"] = [[9] * 24]
    found = report.summary(SETTINGS, answers, ["plain", "auto"], 0)
    assert not found["identical"]
    assert "The texts differ: 1 times, first in question 2 by auto." in report.page(found, {})
    assert "All methods wrote the same texts." in report.page(report.summary(SETTINGS, runs(), ["plain"], 0), {})


def test_the_page_needs_no_network_and_every_drawing_is_well_formed() -> None:
    page = report.page(report.summary(SETTINGS, runs(), ["plain", "auto"], 0), {"auto": timeline()})
    assert not re.search(r"(src|href)=[\"'](?!data:,)|url\(|@import|<script", page)
    assert "fox &amp; &lt;heron&gt;.mirror" in page
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert len([drawing for drawing in drawings if 'role="img"' in drawing]) == 5
    for words in ("Some Processor", "3.11.7", "prefers-color-scheme:dark", "What the devices did: auto"):
        assert words in page


def test_a_bar_is_as_high_as_its_value_and_tells_its_interval() -> None:
    found = report.summary(SETTINGS, runs(), ["plain", "auto"], 0)
    drawing = charts.bars(found["rows"], "over_plain", "interval", {"auto": 0})
    low, high = next(row["interval"] for row in found["rows"] if (row["task"], row["method"]) == ("rag", "auto"))
    assert low < 1.5 < 2.0 < high, "wider than what few questions that are drawn again show"
    assert f"rag, auto: 1.80 times plain, 95 % interval {low:.2f} to {high:.2f}" in drawing
    height = float(re.findall(r'<rect class="c0"[^>]*height="([\d.]+)"', drawing)[0])
    one = float(re.findall(r'class="one"[^>]*y1="([\d.]+)"', drawing)[0])
    zero = max(float(y) for y in re.findall(r'class="grid"[^>]*y1="([\d.]+)"', drawing))
    assert abs(height / (zero - one) - 1.8) < 0.01


def test_without_plain_decoding_the_page_leaves_out_what_it_cannot_draw() -> None:
    answers = {"auto": runs()["auto"]}
    page = report.page(report.summary(SETTINGS, answers, ["auto"], 0), {})
    assert "Speed-up by task" not in page
    assert "How much of a window is right" in page


def test_a_row_in_words_says_nothing_where_nothing_is_known(tmp_path: Path) -> None:
    peer = line(1, 24, 2.0, prefill_s=[None], step_ends_s=[[]], accept_lengths=[], window_lengths=[[]], ttft_s=[None])
    found = report.summary(SETTINGS, {**runs(), "peer": [[peer]]}, ["plain", "auto"], 0)
    said = report.cells(found["rows"][2])
    assert said["tokens/s"] == "12.0"
    assert {said[name] for name in ("decoding", "before loops", "tokens/step", "first token")} == {""}
    report.write(tmp_path, found)
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == found
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
