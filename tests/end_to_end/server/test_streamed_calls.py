"""Calls in streams: cut short they are the same as in one piece, and nobody is left in silence until they are whole."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.server import Limits, Running
from mirrorsd.server.answers import tools
from mirrorsd.server.bundles.call_forms import Speech
from mirrorsd.tests.end_to_end.server.serving_here import CHAT, post, raw, served
from mirrorsd.tests.end_to_end.server.test_resumed_answers import unchunked

RESPONSES = "/v1/responses"
TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 40}}, "required": ["text"]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
PLAN = tools.plan_tools


@pytest.fixture(scope="module")
def impatient(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, limits=Limits(ping_s=0.03), seats=1) as running:
        yield running


def answer_to(running: Running, path: str, body: dict[str, Any]) -> bytes:
    return raw(running, post(running, path, json.dumps({"model": "tiny", **body}).encode())).split(b"\r\n\r\n", 1)[1]


def events_of(answer: bytes) -> list[Any]:
    frames = unchunked(answer).split(b"\n\n")
    return [json.loads(frame.partition(b"data: ")[2]) for frame in frames if b"data: {" in frame]


def test_a_client_hears_something_while_a_call_is_written(impatient: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents write whole files in a call: proxies and clients end a stream that is silent for a minute."""
    stream = MirrorSession._stream

    def slow(self: MirrorSession, request: Any) -> Iterator[Any]:
        with closing(stream(self, request)) as chunks:
            for chunk in chunks:
                time.sleep(0.02)
                yield chunk

    monkeypatch.setattr(MirrorSession, "_stream", slow)
    function = {"name": "write", "parameters": TEXT}
    asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "stream": True}
    frames = unchunked(
        answer_to(impatient, CHAT, {**asked, "messages": [{"role": "user", "content": "fox"}], "max_tokens": 200})
    ).split(b"\n\n")
    called = next(place for place, frame in enumerate(frames) if b'"tool_calls"' in frame)
    assert frames[1:called].count(b": ping") >= 2


def twice(wish: tools.Wish, speech: Speech, limits: Limits, answer: Any = None) -> tools.ToolPlan:
    """A plan of at least two calls: the tiny model would not choose to call again."""
    found = PLAN(wish, speech, limits, answer)
    assert found.grammar is not None and "{0,15}" in found.grammar
    return replace(found, grammar=found.grammar.replace("{0,15}", "{1,15}"))


def test_a_second_call_that_is_cut_short_is_text_behind_the_first(
    impatient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "plan_tools", twice)
    asked = {"input": "fox", "tools": [{"type": "function", "name": "weather", "parameters": CITY}]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": True, "temperature": 0}
    for limit in range(10, 200, 5):
        whole = json.loads(answer_to(impatient, RESPONSES, {**asked, "max_output_tokens": limit}))
        if [item["type"] for item in whole["output"]] == ["function_call", "message"]:
            break
    else:
        pytest.fail("no limit lies within the second call")
    events = events_of(answer_to(impatient, RESPONSES, {**asked, "max_output_tokens": limit, "stream": True}))
    assert (whole["status"], events[-1]["type"]) == ("incomplete", "response.incomplete")
    said = [
        [item.get("content", item.get("arguments")) for item in one["output"]]
        for one in (whole, events[-1]["response"])
    ]
    assert said[0] == said[1]
    assert whole["output"][1]["content"][0]["text"].strip().startswith("<to")
    added, done = (
        [event["output_index"] for event in events if event["type"] == f"response.output_item.{kind}"]
        for kind in ("added", "done")
    )
    assert added == done == [0, 1]


def test_what_fails_in_a_stream_is_an_event_that_clients_know(
    impatient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = MirrorSession._stream

    def failing(self: MirrorSession, request: Any) -> Iterator[Any]:
        with closing(stream(self, request)) as chunks:
            yield next(chunks)
            raise DeviceError("the device is gone")

    monkeypatch.setattr(MirrorSession, "_stream", failing)
    answer = answer_to(impatient, RESPONSES, {"input": "fox", "max_output_tokens": 20, "stream": True})
    events = events_of(answer)
    last = events[-1]
    assert (last["type"], last["code"], last["error"]["message"]) == ("error", "device_failed", "the device is gone")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert b"event: error\n" in answer
