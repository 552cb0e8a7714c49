"""Answers that another server has begun: what a front is told, and what is sent of the rest."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.server.transport.resuming import frames_of
from mirrorsd.tests.end_to_end.server.serving_here import CHAT, post, raw, served, status_of

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "forest", "world"]}, "count": {"type": "integer", "maximum": 9999}},
    "required": ["place", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "ask",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["river", "forest"]}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]
FOX = [{"role": "user", "content": "fox"}]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"messages": FOX, "max_tokens": 24, "ignore_eos": True, "temperature": 0}),
    "sampled": (CHAT, {"messages": FOX, "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}),
    "stopped": (CHAT, {"messages": FOX, "max_tokens": 60, "temperature": 1.0, "seed": 5, "stop": ["e", "zz", "o"]}),
    "told": (
        CHAT,
        {
            "messages": FOX,
            "max_tokens": 12,
            "temperature": 1.0,
            "logprobs": True,
            "top_logprobs": 2,
            "ignore_eos": True,
        },
    ),
    "formed": (
        CHAT,
        {
            **{"messages": FOX, "max_tokens": 90, "temperature": 1.0, "seed": 5},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    "called": (
        CHAT,
        {"messages": FOX, "max_tokens": 120, "temperature": 1.0, "tools": TOOLS, "tool_choice": "required"},
    ),
    "several": (
        CHAT,
        {"messages": FOX, "max_tokens": 7, "temperature": 1.0, "n": 3, "stream_options": {"include_usage": True}},
    ),
    "texts": (
        "/v1/completions",
        {
            "prompt": ["The fox", "A heron"],
            "n": 2,
            "max_tokens": 6,
            "temperature": 1.0,
            "echo": True,
            "ignore_eos": True,
        },
    ),
    "response": ("/v1/responses", {"input": "fox", "max_output_tokens": 20, "temperature": 1.0}),
    "response called": (
        "/v1/responses",
        {
            **{"input": "fox", "max_output_tokens": 120, "temperature": 1.0, "tool_choice": "required"},
            "tools": [{"type": "function", **TOOLS[0]["function"]}],
        },
    ),
}
VARYING = ("timings", "mirror", "usage", "plain_tokens_per_second", "completed_at")
MARK = b": mirrorsd "


@pytest.fixture(scope="module")
def second(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, seats=1) as running:
        yield running


class Heard:
    """What a front has of a stream: frames that are certain, and what it must say to another server."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.state: dict[str, Any] = {}
        self.ids: list[list[int]] = []
        self.seed: int | None = None
        self.is_done = False

    def hear(self, frames: list[bytes]) -> None:
        held: list[bytes] = []
        for frame in frames:
            if not frame.startswith(MARK):
                held.append(frame)
                continue
            mark = json.loads(frame.removeprefix(MARK))
            self.frames += held
            held = []
            self.is_done |= mark.pop("is_done", False)
            if (choice := mark.pop("choice", None)) is not None:
                self.ids += [[] for _ in range(choice + 1 - len(self.ids))]
                self.ids[choice] += mark.pop("ids")
            if "seed" in mark:
                self.seed = mark.pop("seed")
            self.state |= mark

    @property
    def rest(self) -> dict[str, Any]:
        found: dict[str, Any] = {"continue_from": self.ids}
        return found if self.seed is None else {**found, "seed": self.seed}


def stream(running: Running, way: str, more: dict[str, Any], state: dict[str, Any]) -> list[bytes]:
    path, body = WAYS[way]
    document = json.dumps({"model": "tiny", "stream": True, **body, **more}).encode()
    answer = raw(running, post(running, path, document, x_mirrorsd_resume=json.dumps(state)))
    assert status_of(answer) == 200, answer
    return list(filter(None, unchunked(answer.split(b"\r\n\r\n", 1)[1]).split(b"\n\n")))


def unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return found


def said(frames: list[bytes]) -> list[Any]:
    """Events without what is measured; texts that come in other pieces are put together."""
    found: list[Any] = []
    for frame in frames:
        if frame.startswith(b":"):
            continue
        data = frame.split(b"data: ", 1)[1]
        found.append(data.decode() if data == b"[DONE]" else without(json.loads(data)))
    return found


def without(event: Any) -> Any:
    if isinstance(event, dict):
        return {name: without(value) for name, value in event.items() if name not in VARYING}
    return [without(value) for value in event] if isinstance(event, list) else event


def usages(frames: list[bytes]) -> list[tuple[int, int]]:
    found = []
    for frame in frames:
        event = json.loads(frame.split(b"data: ", 1)[1]) if b"data: {" in frame else {}
        for place in (event, event.get("response", {})):
            if counts := place.get("usage"):
                found += [(counts.get("prompt_tokens", counts.get("input_tokens")), counts["total_tokens"])]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_goes_on_elsewhere_wherever_it_broke_off(serving: Running, second: Running, way: str) -> None:
    frames = stream(serving, way, {"method": "plain"}, {})
    whole = Heard()
    whole.hear(frames)
    assert whole.is_done
    marks = [place for place, frame in enumerate(frames) if frame.startswith(MARK)]
    assert len(marks) > 4
    for turn, cut in enumerate(marks[:: max(1, len(marks) // 12)] + marks[-3:]):
        heard = Heard()
        heard.hear(frames[: cut + 1 + turn % 2])  # a frame more has come, and was not certain
        rest = stream(second, way, {"method": ("plain", "mirror")[turn % 2], **heard.rest}, heard.state)
        if heard.is_done:
            continue
        heard.hear(rest)
        assert heard.is_done
        assert text_of(heard.frames) == text_of(whole.frames), (turn, cut)
        assert usages(heard.frames) == usages(whole.frames)
        assert heard.ids == whole.ids
        if turn % 2 == 0:
            assert said(heard.frames) == said(whole.frames), (turn, cut)


def text_of(frames: list[bytes]) -> Any:
    """What a client has of a stream in the end, by choice, whatever the pieces."""
    found: dict[Any, Any] = {}
    for event in said(frames):
        if isinstance(event, str):
            found["end"] = event
            continue
        for choice in event.get("choices", ()):
            mine = found.setdefault(choice["index"], {"text": "", "calls": [], "logprobs": [], "reason": None})
            delta = choice.get("delta", {})
            mine["text"] += delta.get("content") or choice.get("text") or ""
            mine["calls"] += delta.get("tool_calls", ())
            mine["logprobs"] += ((choice.get("logprobs") or {}).get("content")) or ()
            mine["reason"] = choice["finish_reason"] or mine["reason"]
        if "response" in event:
            found[event["type"]] = event["response"]["output"]
        elif "type" in event:
            kept = {name: value for name, value in event.items() if name not in ("delta", "sequence_number")}
            found.setdefault(event["type"], [])
            if not event["type"].endswith("text.delta"):
                found[event["type"]].append(kept)
    return found


@pytest.mark.parametrize("way", ("sampled", "called", "texts", "response"))
def test_a_whole_answer_comes_as_a_stream_to_a_front(serving: Running, second: Running, way: str) -> None:
    frames = stream(serving, way, {"stream": False}, {})
    whole = Heard()
    whole.hear(frames)
    documents = said(whole.frames)
    assert len(documents) == 1
    heard = Heard()
    heard.hear(frames[: len(frames) // 2])
    assert heard.ids
    heard.hear(stream(second, way, {"stream": False, **heard.rest}, heard.state))
    assert said(heard.frames) == documents
    assert usages(heard.frames) == usages(whole.frames)


def test_by_itself_the_field_gives_what_follows_in_a_stream_and_all_of_a_whole_answer(serving: Running) -> None:
    path, body = WAYS["greedy"]
    heard = Heard()
    heard.hear(stream(serving, "greedy", {}, {}))
    ids, text = heard.ids[0], text_of(heard.frames)[0]["text"]
    asked = {"model": "tiny", **body, "continue_from": ids[:10]}
    whole = json.loads(raw(serving, post(serving, path, json.dumps(asked).encode())).split(b"\r\n\r\n", 1)[1])
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["completion_tokens"] == len(ids)
    answer = raw(serving, post(serving, path, json.dumps({**asked, "stream": True}).encode()))
    assert MARK not in answer
    rest = text_of(list(filter(None, unchunked(answer.split(b"\r\n\r\n", 1)[1]).split(b"\n\n"))))[0]["text"]
    assert 0 < len(rest) < len(text)
    assert text.endswith(rest)


def refusal(running: Running, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    answer = raw(
        running, post(running, CHAT, json.dumps({"model": "tiny", **WAYS["greedy"][1], **body}).encode(), **headers)
    )
    return status_of(answer), json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]


def test_what_would_be_another_text_is_refused(serving: Running) -> None:
    status, error = refusal(serving, {}, x_mirrorsd_resume='{"fingerprint": "bundle-0000000000000000"}')
    assert (status, error["code"]) == (409, "fingerprint_differs")
    status, error = refusal(serving, {"continue_from": [7, 7, 7]})
    assert (status, error["code"], error["param"]) == (409, "continuation_differs", "continue_from")
    status, error = refusal(serving, {"continue_from": [[7], [7]]})
    assert (status, error["param"]) == (400, "continue_from")
    assert "ids of 2 choices; 1 are asked for" in error["message"]
    status, error = refusal(serving, {"continue_from": [7, "a"]})
    assert (status, error["param"]) == (400, "continue_from.1")
    status, error = refusal(serving, {"continue_from": [7] * 25})
    assert status == 400
    assert "25 ids" in error["message"]


@pytest.mark.parametrize(
    "header", ("", "[]", "{", '{"id": "x"}', '{"num_ended": -1}', '{"more": 1}', "{" + " " * 2000 + "}")
)
def test_a_header_that_cannot_be_read_is_refused(serving: Running, header: str) -> None:
    if header:
        status, error = refusal(serving, {}, x_mirrorsd_resume=header)
        assert (status, error["code"]) == (400, "invalid_header")


def test_a_long_answer_in_one_piece_costs_a_front_no_more_than_its_bytes() -> None:
    """Twenty tokens with their logarithms at each place: looked through again at every piece, all others would wait."""
    parts = [b"a\n", b"\nb\n\n\nc\n", b"\n", b"\n\n", 20_000_000 * b"x", b"\n", b"\ntorn"]

    async def pieces() -> AsyncIterator[bytes]:
        for part in parts:
            for start in range(0, len(part), 1 << 14):
                yield part[start : start + (1 << 14)]

    async def frames() -> list[bytes]:
        return [frame async for frame in frames_of(pieces())]

    started = process_time()
    assert asyncio.run(frames()) == b"".join(parts).split(b"\n\n")[:-1]
    assert process_time() - started < 3
