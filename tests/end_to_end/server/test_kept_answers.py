"""Answers that go on without their reader: the same text from the start, for whoever knows the id, for a minute."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mirrorsd.server import Running, ServerSettings
from mirrorsd.server.answers import job
from mirrorsd.server.front import build_front
from mirrorsd.server.transport import kept as kept_answers
from mirrorsd.tests.end_to_end.server.serving_here import (
    LIMITS,
    connection,
    get,
    post,
    raw,
    received,
    served,
    status_of,
)

CHAT = "/v1/chat/completions"
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "Every morning the fox"}], "stream": True}
LONG |= {"max_tokens": 300, "ignore_eos": True, "method": "serial"}


@pytest.fixture(scope="module")
def running(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, limits=LIMITS) as found:
        yield found


def body_of(key: str, **more: Any) -> bytes:
    return json.dumps({**LONG, "mirror_keep": key, **more}).encode()


def text_of(answer: bytes) -> str:
    frames = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ") and b"[DONE]" not in line]
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def leave(running: Running, key: str) -> None:
    """Read the beginning of an answer and hang up."""
    with connection(running) as opened:
        opened.sendall(post(running, CHAT, body_of(key)))
        found = b""
        while found.count(b"data: ") < 3:
            found += opened.recv(256)


def wait_until_free(running: Running) -> None:
    bundle = running.service.shelf.loaded["tiny"]
    wait_until(lambda: not bundle.num_running, "a text goes on that should have ended")


def delete(running: Running, key: str) -> bool:
    request = f"DELETE /v1/answers/{key} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nConnection: close\r\n\r\n"
    return bool(json.loads(raw(running, request.encode()).split(b"\r\n\r\n", 1)[1])["cancelled"])


def test_an_answer_goes_on_and_is_read_again_from_its_start(running: Running, held: threading.Event) -> None:
    held.set()
    whole = text_of(raw(running, post(running, CHAT, json.dumps(LONG).encode())))
    assert len(whole) > 200
    held.clear()
    leave(running, "a-first-answer-of-mine")
    assert running.service.shelf.loaded["tiny"].num_running == 1, "nobody reads, and it goes on"
    held.set()
    for _ in range(2):
        again = get(running, "/v1/answers/a-first-answer-of-mine")
        assert status_of(again) == 200 and again.rstrip(b"0\r\n").endswith(b"[DONE]")
        assert text_of(again) == whole
    assert status_of(raw(running, post(running, CHAT, body_of("a-first-answer-of-mine")))) == 409


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("is_front", [False, True])
def test_who_reads_it_is_told_that_it_was_ended(running: Running, *, is_front: bool) -> None:
    """A front has no other server, nor the same one, go on with it."""
    settings, key = ServerSettings(port=0), "an-eighth-answer-of-mine"
    with ExitStack() as stack:
        asked = running
        if is_front:
            asked = stack.enter_context(Running(build_front([running.url], settings), settings))
        opened = stack.enter_context(connection(asked))
        opened.sendall(post(asked, CHAT, body_of(key)))
        found = b""
        while found.count(b"data: ") < 3:
            found += opened.recv(256)
        assert delete(running, key)
        found += received(opened)
    assert b'"cancelled"' in found.split(b"data: ")[-1] and b"[DONE]" not in found
    assert found.endswith(b"0\r\n\r\n"), "its end is not that of a broken connection"
    wait_until_free(running)
    assert status_of(get(running, f"/v1/answers/{key}")) == 204


@pytest.mark.usefixtures("held")
def test_it_ends_by_its_id(running: Running) -> None:
    leave(running, "a-second-answer-of-mine")
    assert delete(running, "a-second-answer-of-mine")
    wait_until_free(running)
    assert status_of(get(running, "/v1/answers/a-second-answer-of-mine")) == 204
    assert not delete(running, "a-second-answer-of-mine")


def test_nobody_reads_it_for_a_while_and_it_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "UNHEARD_S", 0.05)
    leave(running, "a-third-answer-of-mine")
    wait_until_free(running)
    wait_until(lambda: status_of(get(running, "/v1/answers/a-third-answer-of-mine")) == 204)


@pytest.mark.parametrize(
    ("key", "more", "status"),
    [("short", {}, 400), ("a-fourth-answer/../x", {}, 400), ("a-fourth-answer-of-mine", {"stream": False}, 400)],
)
def test_what_cannot_be_kept_is_refused(running: Running, key: str, more: dict[str, Any], status: int) -> None:
    answer = raw(running, post(running, CHAT, body_of(key, **more)))
    assert status_of(answer) == status and b"mirror_keep" in answer


def test_a_refusal_is_told_and_not_kept(running: Running) -> None:
    long = [{"role": "user", "content": "fox " * 600}]
    answer = raw(running, post(running, CHAT, body_of("a-fifth-answer-of-mine", messages=long)))
    assert status_of(answer) == 400 and b"context_length_exceeded" in answer
    assert status_of(get(running, "/v1/answers/a-fifth-answer-of-mine")) == 204
    assert status_of(raw(running, post(running, CHAT, body_of("a-fifth-answer-of-mine", max_tokens=4)))) == 200


@pytest.mark.parametrize(("more", "status"), [({"model": "other"}, 404), ({"n": 9}, 400), ({"modalities": ["x"]}, 400)])
def test_a_refusal_that_nobody_waited_for_is_told(running: Running, more: dict[str, Any], status: int) -> None:
    """It is there, and forgotten, before its reader comes."""
    answer = raw(running, post(running, CHAT, body_of("a-sixth-answer-of-mine", **more)))
    assert status_of(answer) == status and b'"error"' in answer
    assert status_of(get(running, "/v1/answers/a-sixth-answer-of-mine")) == 204


def test_an_answer_that_is_ended_before_it_begins_is_an_error(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "ping", says_nothing)
    bundle = running.service.shelf.loaded.pop("tiny")
    loads, running.service.shelf.load = running.service.shelf.load, never
    try:
        with connection(running) as opened:
            opened.sendall(post(running, CHAT, body_of("a-seventh-answer-of-mine")))
            wait_until(lambda: delete(running, "a-seventh-answer-of-mine"))
            answer = received(opened)
    finally:
        running.service.shelf.load = loads
        running.service.shelf.loaded["tiny"] = bundle
    assert status_of(answer) == 410 and b'"cancelled"' in answer


async def never(_: str) -> None:
    await asyncio.Event().wait()


async def says_nothing(_: object) -> None:
    """No sign of life: it would begin the answer."""
