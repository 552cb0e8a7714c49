"""The desktop sample on a display: it opens, streams, says where words came from, stops, and closes in mid-answer."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.bench.pictures import XVFB, display

pytest.importorskip("tkinter", reason="this Python has no Tk")
pytestmark = pytest.mark.skipif(
    XVFB is None and not os.environ.get("DISPLAY"), reason="no display here, and no Xvfb (apt install xvfb)"
)
SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "desktop_chat.py"
QUESTION = "Tell me of the fox."
DRIVER = """
import json, runpy, sys, time, tkinter as tk
from types import SimpleNamespace

root = tk.Tk()
window = runpy.run_path(sys.argv[1])["Window"](root, *sys.argv[2:])
found = {}

def shown(tag):
    places = window.text.tag_ranges(tag)
    return "".join(window.text.get(*pair) for pair in zip(places[::2], places[1::2]))

def type_in(text):
    window.entry.insert(0, text)
    window.entry.focus_force()
    root.update()
    window.entry.event_generate("<Return>")

def hold():  # after the first word, until somebody stops it
    pipe = window.pipe
    def stream(cancel, **settings):
        said = ""
        for chunk in pipe.stream(cancel=cancel, **settings):
            yield chunk
            said += chunk.text
            while said.strip() and not cancel.is_cancelled:
                time.sleep(0.005)
    window.pipe = SimpleNamespace(stream=stream, manifest=pipe.manifest)

def end():
    root.tk.eval(root.protocol("WM_DELETE_WINDOW"))  # what a window's manager calls

def acts():
{acts}

running = acts()
waits = [next(running)]
def go_on():
    try:
        while waits[0]():
            waits[0] = next(running)
        root.after(5, go_on)
    except StopIteration:
        end()
go_on()
root.mainloop()
print(json.dumps(found))
"""
ANSWERS = """
    yield lambda: len(window.messages) == 2 and window.is_ready
    found["kept"] = window.messages[1]["content"]
    found["status"] = window.status["text"]
    found["all"] = window.text.get("1.0", "end")
    found["shown"] = {tag: shown(tag) for tag in ("you", "window", "lookup", "correction", "plain")}
"""
STOPS = """
    yield lambda: window.is_ready and not window.messages
    hold()
    type_in("Tell me of the fox.")
    yield lambda: len(window.text.get("1.0", "end").strip()) > len("Tell me of the fox.")
    type_in("and the heron?")  # it still answers
    found["asked"] = len(window.messages)
    window.stop.invoke()
    yield lambda: window.is_ready
    found["status"], found["button"] = window.status["text"], str(window.stop["state"])
    type_in("")  # what was typed is still there, and is asked now
    yield lambda: len(window.text.get("1.0", "end").split("and the heron?")[-1].strip()) > 0
    found["messages"] = [message["role"] for message in window.messages]
    window.stop.invoke()
    yield lambda: window.is_ready
"""
CLOSES = """
    yield lambda: window.is_ready
    hold()
    type_in("Tell me of the fox.")
    yield lambda: len(window.text.get("1.0", "end").strip()) > len("Tell me of the fox.")
    found["answering"] = not window.is_ready
"""
NO_BUNDLE = """
    yield lambda: window.status["text"] != "loading ..."
    type_in("Is anybody there?")
    found["status"], found["messages"] = window.status["text"], window.messages
"""


@pytest.fixture(scope="module")
def shown_on() -> Iterator[str]:
    if XVFB is None:
        yield os.environ["DISPLAY"]
        return
    with display(800, 640) as name:
        yield name


def run(shown_on: str, acts: str, *words: str) -> dict[str, Any]:
    """Drive the sample's window, and close it; a process that does not end then is an error."""
    code = DRIVER.replace("{acts}", acts)
    environment = {**os.environ, "DISPLAY": shown_on}
    finished = subprocess.run(
        [sys.executable, "-c", code, str(SAMPLE), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return dict(json.loads(finished.stdout))


def test_a_first_question_is_answered_and_every_word_has_its_colour(shown_on: str, tiny_bundle: Path) -> None:
    found = run(shown_on, ANSWERS, str(tiny_bundle), QUESTION)
    you = found["shown"].pop("you")
    assert you.strip() == QUESTION
    assert found["kept"] and "tokens/s" in found["status"]
    assert found["all"].strip("\n") == f"{QUESTION}\n{found['kept']}".strip("\n")
    assert sum(map(len, found["shown"].values())) == len(found["kept"]), "each letter has one colour"
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        if not pipe.manifest.chat_defaults.generation.get("temperature"):
            asked = [{"role": "user", "content": QUESTION}]
            assert found["kept"] == pipe.generate(messages=asked, method="plain", max_new_tokens=400).text


def test_an_answer_is_stopped_and_the_next_question_answered(shown_on: str, tiny_bundle: Path) -> None:
    found = run(shown_on, STOPS, str(tiny_bundle))
    assert found["asked"] == 1, "one question at a time"
    assert (found["status"], found["button"]) == ("stopped", "disabled")
    assert found["messages"] == ["user", "assistant", "user"]


def test_the_window_closes_in_mid_answer(shown_on: str, tiny_bundle: Path) -> None:
    assert run(shown_on, CLOSES, str(tiny_bundle))["answering"] is True


def test_a_bundle_that_is_not_there_is_said_in_the_window(shown_on: str, tmp_path: Path) -> None:
    found = run(shown_on, NO_BUNDLE, str(tmp_path / "none.mirror"))
    assert "none.mirror" in found["status"] and found["messages"] == []
