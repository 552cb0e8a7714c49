"""The picture of a text: words on the steps, lanes, a legend, and nothing that a stranger cannot read."""

import doctest
import re
import xml.etree.ElementTree as ElementTree

import pytest

from mirrorsd.cli.output import timeline
from mirrorsd.cli.output.timeline import Box, Timeline, draw


def step(start: float, end: float, text: str, window: int, accepted: int) -> Box:
    return Box("text", "step", start, end, {"text": text, "window": window, "accepted": accepted})


BOXES = (
    step(0, 100, "Once <upon>\na time", 4, 3),
    step(100, 200, " there", 0, 0),
    Box("target", "prefix", 0, 40, {}),
    Box("target", "exit1", 40, 44, {}),
    Box("target", "suffix", 44, 90, {}),
    Box("draft", "expand", 20, 80, {}),
    Box("host", "exposed", 90, 99, {}),
)
WHOLE = Timeline("mirror on a laptop", BOXES, 0.0, 200.0, plain_ms=50.0)


def texts_of(drawn: str) -> list[str]:
    root = ElementTree.fromstring(drawn)
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_steps_show_their_words_and_how_many_guesses_were_right() -> None:
    texts = texts_of(draw(WHOLE))
    assert "Once <upon>\u23cea time" in texts
    assert "3 of 4 right" in texts
    assert "no guess" in texts


def test_the_legend_says_in_words_what_is_there_and_nothing_else() -> None:
    texts = texts_of(draw(WHOLE))
    assert {"target: first layers", "the target waits for the draft"} <= set(texts)
    assert "reading the prompt" not in texts
    assert {"text", "target", "draft"} <= set(texts)
    assert not {"suffix", "expand", "exposed", "exit1"} & set(texts)


def test_plain_decoding_has_a_lane_where_its_speed_is_known() -> None:
    whole = WHOLE.with_plain()
    ends = [box.end for box in whole.boxes if box.lane == "plain"]
    assert ends == [50.0, 100.0, 150.0, 200.0, 250.0]
    assert "plain decoding" in texts_of(draw(whole))
    assert "plain decoding would have said 4 by then" in WHOLE.figures()
    unknown = Timeline("t", BOXES, 0.0, 200.0)
    assert unknown.with_plain() is unknown
    assert "plain decoding" not in texts_of(draw(unknown))
    assert not any("plain" in figure for figure in unknown.figures())


def test_figures_say_what_was_gained_and_what_was_waited_for() -> None:
    assert Timeline("t", BOXES, 0.0, 200.0).figures() == [
        "5 tokens in 2 passes of the target, 200 ms",
        "100% of the draft's work cost no time, beside the target's",
        "the target waited for the draft 4% of the time",
    ]


@pytest.mark.parametrize("width", [400, 1200, 20_000])
def test_no_word_leaves_its_box(width: int) -> None:
    root = ElementTree.fromstring(draw(WHOLE.with_plain(), width))
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        rect = group.find("{http://www.w3.org/2000/svg}rect")
        if "data-start" in group.attrib and rect is not None:
            for text in group.findall("{http://www.w3.org/2000/svg}text"):
                assert 6.6 * len(text.text or "") <= float(rect.attrib["width"])


def test_every_colour_has_a_dark_one() -> None:
    light, dark = timeline._STYLE.split("@media(prefers-color-scheme:dark)")
    names = set(re.findall(r"--(\w+):", light))
    assert names == set(re.findall(r"--(\w+):", dark))
    assert set(re.findall(r"var\(--(\w+)\)", timeline._STYLE)) <= names


def test_a_stretch_holds_what_touches_it() -> None:
    part = WHOLE.between(95, 120)
    assert [box.name for box in part.boxes] == ["step", "step", "exposed"]
    assert WHOLE.usual_stretch(1) == 100.0


def test_worked_examples() -> None:
    assert doctest.testmod(timeline).failed == 0
