"""What a front asks for, and what it hands on, beside texts."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.server import Limits, Running
from mirrorsd.server.answers import job
from mirrorsd.server.front import Passage
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.tests.end_to_end.server.serving_here import get, post, raw, served, status_of
from mirrorsd.tests.end_to_end.server.test_front import front_of


def test_a_balancer_behind_a_front_compresses_nothing() -> None:
    """Frames are read as they come: a stream in gzip would have none, and be asked for again and again."""
    asked: list[bytes] = []

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(str(self.headers["accept-encoding"]).encode())
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with front_of([f"http://127.0.0.1:{server.server_port}"]) as front:
            words = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nAccept-Encoding: gzip\r\n"
            raw(front, f"{words}Connection: close\r\n\r\n".encode())
        server.shutdown()
    assert asked and set(asked) == {b"identity"}


def test_the_page_is_as_closed_behind_a_front(serving: Running) -> None:
    with front_of([serving.url]) as front:
        request = "GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n"
        direct, passed = (raw(one, (request % one.port).encode()).lower() for one in (serving, front))
    assert direct.count(b"cross-origin-") == passed.count(b"cross-origin-") == 2


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_has_no_effect_is_named_through_a_front(serving: Running, *, is_stream: bool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2, "tomorrow": 1}
    with front_of([serving.url]) as front:
        answer = raw(front, post(front, "/v1/chat/completions", json.dumps({**body, "stream": is_stream}).encode()))
    assert status_of(answer) == 200 and b"x-mirrorsd-unknown-fields: tomorrow\r\n" in answer


def test_why_not_to_ask_again_is_handed_on_though_the_stream_had_begun() -> None:
    """A load that fails behind signs of life: clients would begin it again and again."""
    exchange = Exchange({"type": "http", "headers": []}, asyncio.Event().wait, asyncio.Event().wait, Limits())  # type: ignore[arg-type]
    passage = Passage(exchange, b"{}")
    told = {"x-should-retry": "false", "retry-after": "3", "set-cookie": "a"}
    assert asyncio.run(passage._end_with(503, [b'data: {"error": {"code": "loading"}}'], told)) is False
    assert passage.refusal is not None and passage.refusal.error == {"code": "loading"}
    assert passage.refusal.headers == {
        "content-type": "application/json",
        "x-should-retry": "false",
        "retry-after": "3",
    }


@pytest.fixture(scope="module")
def impatient(tiny_bundle: Path) -> Iterator[Running]:
    """A server that soon tells that it is there."""
    with served({"tiny": tiny_bundle}, limits=Limits(ping_s=0.05)) as server:
        yield server


@contextmanager
def loading(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The server's bundle is being loaded, within it, until the event is set."""
    shelf, may = server.service.shelf, threading.Event()
    bundle = shelf.loaded.pop("tiny")

    def opened(_: str) -> Any:
        assert may.wait(60)
        return bundle

    monkeypatch.setattr(shelf, "_open", opened)
    try:
        yield may
    finally:
        may.set()


TOKENS = {
    "/tokenize": {"content": "the fox"},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": [{"role": "user", "content": "fox"}]},
}


@pytest.mark.parametrize("path", TOKENS)
def test_what_is_no_text_waits_for_a_bundle_too(impatient: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front leaves a server that says nothing: it hears that this one is there."""
    heard, ping = threading.Event(), job.ping
    num_pings = 0

    async def counting(exchange: Exchange) -> None:
        nonlocal num_pings
        await ping(exchange)
        num_pings += 1
        if num_pings == 12:
            heard.set()

    monkeypatch.setattr(job, "ping", counting)
    with front_of([impatient.url], ping_s=0.1) as front:
        asked = post(front, path, json.dumps(TOKENS[path]).encode())
        usual = raw(front, asked)
        with loading(impatient, monkeypatch) as may:
            threading.Thread(target=lambda: heard.wait(60) and may.set()).start()
            answer = raw(front, asked)
    assert status_of(answer) == status_of(usual) == 200 and heard.is_set()
    first, second = (json.loads(one.split(b"\r\n\r\n", 1)[1]) for one in (answer, usual))
    assert first == second


def test_properties_of_a_bundle_that_is_being_loaded_are_told_later(
    impatient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with front_of([impatient.url]) as front:
        with loading(impatient, monkeypatch):
            answer = get(front, "/props")
            assert status_of(answer) == 503 and b'"loading"' in answer and b"retry-after: 5" in answer.lower()
        assert status_of(get(impatient, "/props")) == 200, "who asks without a front waits for it"
        assert status_of(get(front, "/props")) == 200
