"""Clients that go away: their text ends within a step, their seat is free, the next text is right."""

import asyncio
import json
import math
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mirrorsd.graphs.errors import Cancelled
from mirrorsd.runtime import CancelToken, MirrorSession
from mirrorsd.server import Running
from mirrorsd.server.bundles.loaded import LoadedBundle
from mirrorsd.tests.end_to_end.server.serving_here import connection, post, raw, received, served, status_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Every morning the fox"}]
LONG = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 450, "ignore_eos": True}
SHORT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "ignore_eos": True, "method": "plain"}
PAUSE_S = 0.005
"""Behind each chunk: a long text takes two seconds, and nobody is so slow that it is over when he leaves."""
METHODS = ("plain", "serial", "mirror", "auto")


def text_of(running: Running, body: dict[str, Any]) -> str:
    answer = raw(running, post(running, CHAT, json.dumps(body).encode()))
    assert status_of(answer) == 200
    return str(json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"])


def leave_in_mid_stream(running: Running, number: int) -> None:
    """Read some of a long stream and go away, by turns politely and with a reset."""
    body = json.dumps({**LONG, "method": METHODS[number % 4]}).encode()
    with connection(running) as opened:
        opened.sendall(post(running, CHAT, body))
        read = 0
        while read < 700 + 97 * (number % 13):
            read += len(opened.recv(256))
        if number % 2:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def wait_until_free(running: Running) -> None:
    """Until nothing runs any more."""
    bundle = running.service.shelf.loaded["tiny"]
    wait_until(lambda: not bundle.num_running and not bundle.num_waiting, "a text that nobody reads goes on")


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each text that was cancelled, how many of its steps began after that; long texts take their time."""
    found: list[int] = []
    asked: dict[CancelToken, float] = {}
    cancel, stream = CancelToken.cancel, MirrorSession._stream

    def noted(self: CancelToken) -> None:
        cancel(self)
        asked.setdefault(self, time.perf_counter())

    def watched(self: MirrorSession, request: Any) -> Any:
        try:
            for chunk in stream(self, request):
                yield chunk
                time.sleep(PAUSE_S if request.config.max_new_tokens == LONG["max_tokens"] else 0.0)
        except (Cancelled, GeneratorExit):
            told = asked.get(request.config.cancel, math.inf)  # it may end before that is noted
            found.append(sum(step.started > told for step in request.steps))
            raise

    monkeypatch.setattr(CancelToken, "cancel", noted)
    monkeypatch.setattr(MirrorSession, "_stream", watched)
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[MirrorSession]:
    """The session of each text that was begun."""
    found: list[MirrorSession] = []
    stream = MirrorSession._stream

    def watched(self: MirrorSession, request: Any) -> Any:
        found.append(self)
        yield from stream(self, request)

    monkeypatch.setattr(MirrorSession, "_stream", watched)
    return found


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.long)])
def test_who_leaves_in_mid_stream_costs_no_seat_and_no_text(serving: Running, count: int, cancelled: list[int]) -> None:
    expected = text_of(serving, SHORT)
    for number in range(count):
        leave_in_mid_stream(serving, number)
        wait_until_free(serving)
        assert text_of(serving, {**SHORT, "method": METHODS[number % 4]}) == expected
    wait_until(lambda: len(cancelled) == count)
    assert max(cancelled) <= 1
    assert len(serving.service.shelf.loaded["tiny"]._tokens) == 0


@pytest.mark.usefixtures("held")
def test_who_leaves_an_answer_in_one_piece_ends_it(
    serving: Running, cancelled: list[int], begun: list[MirrorSession]
) -> None:
    bundle = serving.service.shelf.loaded["tiny"]
    with connection(serving) as opened:
        opened.sendall(post(serving, CHAT, json.dumps({**LONG, "stream": False, "n": 8}).encode()))
        wait_until(lambda: bundle.num_running)
    wait_until_free(serving)
    wait_until(lambda: len(cancelled) == len(begun), "a choice goes on")
    assert len(begun) <= serving.service.settings.seats, "each seat may write a choice"


@pytest.mark.usefixtures("held")
def test_who_leaves_the_queue_is_never_begun(
    serving: Running, cancelled: list[int], begun: list[MirrorSession]
) -> None:
    bundle = serving.service.shelf.loaded["tiny"]
    body = post(serving, CHAT, json.dumps(LONG).encode())
    with connection(serving) as first, connection(serving) as second:
        first.sendall(body)
        second.sendall(body)
        assert first.recv(64)
        assert second.recv(64)
        with connection(serving) as third:
            third.sendall(body)
            wait_until(lambda: bundle.num_waiting)
        wait_until(lambda: not bundle.num_waiting)
    wait_until_free(serving)
    wait_until(lambda: len(cancelled) == 2)
    assert len(begun) == 2


def test_a_full_queue_says_when_to_come_again(tiny_bundle: Any, held: threading.Event) -> None:
    with served({"tiny": tiny_bundle}, seats=1, queue=1) as running:
        body = post(running, CHAT, json.dumps(LONG).encode())
        with connection(running) as first, connection(running) as second:
            first.sendall(body)
            assert first.recv(64)
            second.sendall(body)
            wait_until(lambda: running.service.shelf.loaded["tiny"].num_waiting)
            answer = raw(running, post(running, CHAT, json.dumps(SHORT).encode()))
        assert status_of(answer) == 429
        assert b"retry-after: " in answer
        assert b'"queue_full"' in answer
        wait_until_free(running)
        held.set()
        assert status_of(raw(running, post(running, CHAT, json.dumps(SHORT).encode()))) == 200


@pytest.mark.usefixtures("held")
def test_the_official_client_comes_again_when_the_queue_is_full(tiny_bundle: Any) -> None:
    openai = pytest.importorskip("openai")
    with served({"tiny": tiny_bundle}, seats=1, queue=0) as running, ThreadPoolExecutor(1) as pool:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=4) as client:
            with connection(running) as first:
                first.sendall(post(running, CHAT, json.dumps(LONG).encode()))
                assert first.recv(64)
                answer = pool.submit(client.chat.completions.create, model="tiny", messages=MESSAGES, max_tokens=4)
                wait_until(lambda: 'status="429"' in running.service.metrics.text().decode())
            assert answer.result(30).choices[0].message.content
        assert b'status="429"' in running.service.metrics.text()


def test_a_prompt_that_is_read_until_the_grace_is_over_begins_no_text(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end its text but the server's own end, which breaks connections off without a word."""
    encode, is_reading = LoadedBundle.encode_chat, threading.Event()

    async def read_on(bundle: LoadedBundle, *what: Any, **ends: bool) -> list[int]:
        is_reading.set()
        while not running.service.is_closing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        return await encode(bundle, *what, **ends)

    monkeypatch.setattr(LoadedBundle, "encode_chat", read_on)
    with served({"tiny": tiny_bundle}, grace_s=0.1) as running, connection(running) as opened:
        opened.sendall(post(running, CHAT, json.dumps({**SHORT, "stream": False}).encode()))
        assert is_reading.wait(30)
        running.server.should_exit = True
        answer = received(opened)
    assert status_of(answer) == 503 and b'"closing"' in answer
