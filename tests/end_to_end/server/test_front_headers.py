"""What a front asks for, and what it hands on, beside texts."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from mirrorsd.server import Limits, Running
from mirrorsd.server.answers import job
from mirrorsd.server.front import Passage, servers_of
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.tests.end_to_end.server.serving_here import get, post, raw, served, status_of
from mirrorsd.tests.end_to_end.server.test_front import free_port, front_of


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the log says, though a command in this process may have sent it to stderr."""
    monkeypatch.setattr(logging.getLogger("mirrorsd.server"), "propagate", True)
    return caplog


@contextmanager
def answering(head: dict[str, str], body: bytes = b"") -> Iterator[tuple[str, list[Message]]]:
    """The address of a balancer that gives everybody this answer, and the heads of what it was asked."""
    asked: list[Message] = []

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers)
            self.send_response(200)
            for name, value in head.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Noting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_a_balancer_behind_a_front_compresses_nothing() -> None:
    """Frames are read as they come: a stream in gzip would have none, and be asked for again and again."""
    with answering({"content-length": "0"}) as (url, asked), front_of([url]) as front:
        get(front, "/v1/models", "Accept-Encoding: gzip")
    assert [head["accept-encoding"] for head in asked] == ["identity"]


def test_a_cookie_that_one_client_gets_is_sent_for_no_other() -> None:
    """A balancer that keeps a client at one server by a cookie would have all of them there."""
    with answering({"content-length": "0", "set-cookie": "server=1; path=/"}) as (url, asked), front_of([url]) as front:
        get(front, "/v1/models", "Cookie: own=1")
        get(front, "/v1/models")
    assert [head["cookie"] for head in asked] == ["own=1", None]
    assert [head["user-agent"] for head in asked] == [None, None], "nor has a client the front's headers"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_text_without_comments_for_the_front_is_asked_for_once(
    *, is_stream: bool, said: pytest.LogCaptureFixture
) -> None:
    """Of other servers, or behind what leaves comments out: it can neither be passed on nor gone on with."""
    words = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    with answering({"content-type": "text/event-stream"}, words) as (url, asked), front_of([url]) as front:
        answer = post(front, "/v1/chat/completions", json.dumps({"messages": [], "stream": is_stream}).encode())
        answer = raw(front, answer)
    assert status_of(answer) == 502 and b'"no_comments"' in answer and len(asked) == 1
    assert url.removeprefix("http://") in said.text and url.encode() not in answer


def test_who_cannot_be_reached_takes_back_nothing_that_another_server_said(
    serving: Running, said: pytest.LogCaptureFixture
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    serving.service.is_closing = True
    try:
        for urls in ([serving.url, dead], [dead, serving.url]):
            with front_of(urls, elsewhere_s=0.1) as front:
                assert b'{"status": "closing"}' in get(front, "/health")
                answer = raw(front, post(front, "/tokenize", b'{"content": "fox"}'))
            assert status_of(answer) == 503 and b'"closing"' in answer and b"retry-after: 5" in answer.lower()
    finally:
        serving.service.is_closing = False
    assert f"{dead}: ConnectError All connection attempts failed" in said.text, "the log says why"


def test_who_waited_long_for_a_server_that_dies_still_gets_another_one() -> None:
    """In its queue, or for its bundle: the front has only then begun to look for one."""
    times: list[float] = []

    class Dying(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            times.append(monotonic())
            if len(times) == 1:
                sleep(0.6)
            if len(times) < 3:
                return
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with front_of([f"http://127.0.0.1:{server.server_port}"], elsewhere_s=0.5) as front:
            answer = raw(front, post(front, "/v1/chat/completions", b"{}"))
        server.shutdown()
    assert status_of(answer) == 200 and len(times) == 3


def test_the_length_of_what_has_no_body_is_that_of_http(serving: Running) -> None:
    """None with 204 and 304; that of the answer to a GET where only its head is asked for."""
    with front_of([serving.url]) as front:
        for asked in (serving, front):
            page = get(asked, "/").split(b"\r\n\r\n")[0].lower()
            tag = next(line for line in page.split(b"\r\n") if line.startswith(b"etag: "))[6:].decode()
            for answer in (get(asked, "/v1/answers/mirrored-answer-0009"), get(asked, "/", f"If-None-Match: {tag}")):
                assert status_of(answer) in (204, 304) and answer.endswith(b"\r\n\r\n")
                assert b"content-length" not in answer.lower() and b"transfer-encoding" not in answer.lower()
            head = raw(asked, f"HEAD / HTTP/1.1\r\nHost: 127.0.0.1:{asked.port}\r\nConnection: close\r\n\r\n".encode())
            lengths = [
                [line for line in one.split(b"\r\n") if b"content-length" in line] for one in (page, head.lower())
            ]
            assert lengths[0] == lengths[1] != []


def test_a_path_with_another_method_names_its_methods_behind_a_front_too(serving: Running) -> None:
    with front_of([serving.url]) as front:
        answer = raw(front, post(front, "/v1/models", b"{}"))
    assert status_of(answer) == 405 and b"allow: get, head\r\n" in answer.lower()


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


def passage_of(body: bytes, send: Any = None) -> Passage:
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/completions", "query_string": b"", "headers": []}
    return Passage(Exchange(scope, asyncio.Event().wait, send or asyncio.Event().wait, Limits()), body)  # type: ignore[arg-type]


def test_a_body_grows_by_what_was_sent_alone() -> None:
    """Where a server has taken it, another one must not find it too long."""
    body = json.dumps({"prompt": 1000 * "\u6c34\U0001f30a"}, ensure_ascii=False).encode()
    passage = passage_of(body)
    asyncio.run(passage._take({"id": "cmpl-1", "seed": 7, "choice": 0, "ids": [5, 6]}, [], None))  # type: ignore[arg-type]
    found = passage.request(*servers_of(["http://127.0.0.1:1"])).content
    assert json.loads(found) == {**json.loads(body), "seed": 7, "continue_from": [[5, 6]]}
    assert len(found) < len(body) + 60


def test_what_is_refused_behind_a_beginning_names_its_field() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    passage = passage_of(b"{}", send)
    error = {"error": {"message": "seed: no.", "param": "seed", "code": "invalid_value"}}

    async def refused() -> None:
        await passage._take({"id": "cmpl-1"}, [], None)  # type: ignore[arg-type]
        await passage._end_with(400, [b"data: " + json.dumps(error).encode()], {})

    asyncio.run(refused())
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"] == {**error["error"], "type": "invalid_request_error"}


def test_why_not_to_ask_again_is_handed_on_though_the_stream_had_begun() -> None:
    """A load that fails behind signs of life: clients would begin it again and again."""
    passage = passage_of(b"{}")
    told = {"x-should-retry": "false", "Retry-After": "3", "set-cookie": "a"}
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
