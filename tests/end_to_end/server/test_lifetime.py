"""Loading, several bundles, and the end: what runs is finished or cut in order, nothing is leaked."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mirrorsd.devices import freed_memory
from mirrorsd.server import Limits, Running, ServerSettings
from mirrorsd.server.answers import job
from mirrorsd.server.app import build_app
from mirrorsd.server.bundles.shelf import Shelf
from mirrorsd.server.errors import ApiError
from mirrorsd.server.front import build_front
from mirrorsd.server.running import configured
from mirrorsd.server.transport import deadlines
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.tests.end_to_end.server.serving_here import TINY, connection, get, post, raw, received, served, status_of
from mirrorsd.tests.end_to_end.server.test_resumed_answers import unchunked

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "fox"}], "stream": True, "max_tokens": 450, "ignore_eos": True, "n": 8}


def body_of(answer: bytes) -> Any:
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])


def ask(running: Running, name: str | None) -> Any:
    body: dict[str, Any] = {**LONG, "stream": False, "max_tokens": 4, "n": 1}
    if name is not None:
        body["model"] = name
    return body_of(raw(running, post(running, CHAT, json.dumps(body).encode())))


class Loading:
    """A bundle that is being loaded until so many signs of life were sent meanwhile."""

    def __init__(self, running: Running, num_pings: int, monkeypatch: pytest.MonkeyPatch) -> None:
        shelf, ping = running.service.shelf, job.ping
        (name,) = shelf.loaded
        bundle, self.num_pings, self._ends = shelf.loaded.pop(name), 0, threading.Event()

        async def counting(exchange: Exchange) -> None:
            await ping(exchange)
            self.num_pings += 1
            if self.num_pings == num_pings:
                self._ends.set()

        def opened(_: str) -> Any:
            assert self._ends.wait(60), "nobody was told that a bundle is being loaded"
            return bundle

        monkeypatch.setattr(job, "ping", counting)
        monkeypatch.setattr(shelf, "_open", opened)


@pytest.fixture(scope="module")
def hasty(tiny_bundle: Path) -> Iterator[tuple[Running, Running]]:
    """A server that soon tells that it is there, and a front that leaves it after a short silence."""
    before = ServerSettings(port=0, limits=Limits(ping_s=0.1))
    with (
        served({"tiny": tiny_bundle}, limits=Limits(ping_s=0.05)) as server,
        Running(build_front([server.url], before), before) as front,
    ):
        yield server, front


WAITING = {
    CHAT: {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 8, "temperature": 0},
    "/v1/completions": {"prompt": ["the fox", "a heron"], "max_tokens": 8, "temperature": 0},
    "/v1/responses": {"model": "tiny", "input": "fox", "max_output_tokens": 8, "temperature": 0},
}


def said(answer: bytes, *, is_stream: bool) -> list[str]:
    """What an answer says, its ids and times apart."""
    body = unchunked(answer.split(b"\r\n\r\n", 1)[1]) if is_stream else answer.split(b"\r\n\r\n", 1)[1]
    return re.findall(r'"(?:text|content|delta|total_tokens)": ?("[^"]*"|[0-9]+)', body.decode())


@pytest.mark.parametrize("is_front", [False, True])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", WAITING)
def test_who_waits_for_a_bundle_hears_that_somebody_is_there(
    hasty: tuple[Running, Running], path: str, is_stream: bool, is_front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front takes a server that says nothing for one that hangs."""
    server, asked = hasty[0], hasty[is_front]
    request = post(asked, path, json.dumps({**WAITING[path], "stream": is_stream}).encode())
    usual = raw(asked, request)
    if is_stream or is_front:
        loading = Loading(server, 12, monkeypatch)
    answer = raw(asked, request)
    if is_stream or is_front:
        assert loading.num_pings >= 12
    assert status_of(answer) == 200 and (not is_stream or answer.count(b": ping") >= 12)
    assert b": mirrorsd" not in answer
    assert said(answer, is_stream=is_stream) == said(usual, is_stream=is_stream) != []


@pytest.mark.parametrize("is_front", [False, True])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", WAITING)
def test_what_is_wrong_is_told_behind_a_load_too(
    hasty: tuple[Running, Running], path: str, is_stream: bool, is_front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, asked = hasty[0], hasty[is_front]
    if is_stream or is_front:
        Loading(server, 12, monkeypatch)
    wrong = {**WAITING[path], "stream": is_stream, "continue_from": [[1], [2], [3]]}
    answer = raw(asked, post(asked, path, json.dumps(wrong).encode()))
    assert status_of(answer) == (200 if is_stream else 400)
    assert b"continue_from has ids of 3 choices" in answer and b"[DONE]" not in answer
    assert is_stream or b"content-type: application/json" in answer.lower()


def test_bundles_by_name_share_the_memory_that_there_is(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "_fits", lambda self, name, needs: not self.loaded)
    with served({"one": tiny_bundle, "two": tiny_bundle}, seats=1) as running:
        shelf = running.service.shelf
        assert ask(running, None)["model"] == "one"
        assert list(shelf.loaded) == ["one"]
        first = shelf.loaded["one"].pipe
        assert ask(running, "two")["model"] == "two"
        assert list(shelf.loaded) == ["two"]
        assert not first.engine.is_open
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda name=name: answers.append(ask(running, name)["model"]))
            for name in ("one", "two", "one", "two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == ["one", "one", "two", "two"]


def test_who_waits_for_room_gets_it_though_others_are_asked_all_the_time(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients of one bundle take turns, so that it is never idle; those of the other are served, or refused."""
    monkeypatch.setattr(Shelf, "_fits", lambda self, name, needs: not self.loaded)
    is_over = threading.Event()
    with served({"one": tiny_bundle, "two": tiny_bundle}, seats=2, queue=2) as running, ThreadPoolExecutor(12) as pool:

        def ask_on() -> None:
            while not is_over.is_set():
                ask(running, "one")

        busy = [pool.submit(ask_on) for _ in range(3)]
        wait_until(lambda: running.service.shelf.loaded["one"].num_running)
        found = [pool.submit(ask, running, "two") for _ in range(8)]
        answers = [answer.result(60) for answer in found]
        is_over.set()
        for one in busy:
            one.result(60)
    assert any(answer.get("model") == "two" for answer in answers)
    refused = [answer["error"]["code"] for answer in answers if "error" in answer]
    assert set(refused) <= {"queue_full"}


def test_a_name_may_have_a_slash(tiny_bundle: Path) -> None:
    with served({"org/story": tiny_bundle}, seats=1) as running:
        for path in ("/v1/models/org/story", "/models/org/story", "/v1/models/org%2Fstory"):
            assert body_of(get(running, path))["id"] == "org/story"
        assert body_of(get(running, "/v1/models/org"))["error"]["code"] == "model_not_found"


def test_both_stay_where_there_is_room_and_what_they_need_is_said(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "mirrorsd.server"), served({"one": tiny_bundle, "two": tiny_bundle}) as running:
        assert [ask(running, name)["model"] for name in ("one", "two")] == ["one", "two"]
        assert list(running.service.shelf.loaded) == ["one", "two"]
    said = [record.getMessage() for record in caplog.records]
    needed = next(i for i, line in enumerate(said) if line.startswith("two needs about "))
    assert needed < next(i for i, line in enumerate(said) if line.startswith("loading two"))


def test_memory_goes_back_to_the_system_now_and_then(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(freed_memory, "_of_glibc", lambda _: given.append)
    monkeypatch.setattr(freed_memory, "EVERY_S", 1e9)
    with served({"tiny": tiny_bundle}, seats=1) as running:
        assert ask(running, "tiny")["model"] == "tiny"
        assert not given
        monkeypatch.setattr(freed_memory, "EVERY_S", 0.0)
        assert ask(running, "tiny")["model"] == "tiny"
        wait_until(lambda: given)


def test_running_answers_may_finish_and_new_ones_are_refused(tiny_bundle: Path) -> None:
    with served({"tiny": tiny_bundle}, grace_s=20) as running, connection(running) as opened:
        opened.sendall(post(running, CHAT, json.dumps({**LONG, "n": 1}).encode()))
        assert opened.recv(64)
        running.server.should_exit = True
        rest = received(opened)
        assert b"data: [DONE]" in rest


@pytest.mark.parametrize("is_front", [False, True])
def test_who_asks_on_an_open_connection_while_it_closes_is_told_so(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, *, is_front: bool
) -> None:
    monkeypatch.setattr(deadlines, "LINGER_S", 20.0)
    with served({"tiny": tiny_bundle}, seats=1) as server, ExitStack() as stack:
        front = build_front([server.url], ServerSettings(port=0))
        running = stack.enter_context(Running(front, ServerSettings(port=0))) if is_front else server
        opened = stack.enter_context(connection(running))
        opened.sendall(post(running, CHAT, b'{"messages": 5}', Connection="keep-alive"))
        assert b" 400 " in opened.recv(65536)
        running.server.should_exit = True
        wait_until(lambda: running.service.is_closing)
        opened.sendall(post(running, CHAT, json.dumps({**LONG, "n": 1}).encode(), Connection="keep-alive"))
        answer = received(opened)
    assert b" 503 " in answer.split(b"\r\n", 1)[0]
    assert {b"retry-after: 5", b"connection: close"} <= set(answer.lower().split(b"\r\n"))


@pytest.mark.usefixtures("held")
def test_after_the_grace_streams_end_with_an_error_and_seats_are_free(tiny_bundle: Path) -> None:
    with served({"tiny": tiny_bundle}, grace_s=0.2, seats=1) as running:
        bundle = running.service.shelf.loaded["tiny"]
        with connection(running) as opened:
            opened.sendall(post(running, CHAT, json.dumps(LONG).encode()))
            assert opened.recv(64)
            running.server.should_exit = True
            rest = received(opened)
    assert b'"error"' in rest
    assert b"[DONE]" not in rest
    assert bundle.num_running == 0
    assert not bundle.pipe.engine.is_open


@pytest.mark.usefixtures("held")
def test_a_front_ends_what_outlasts_its_grace_in_words(tiny_bundle: Path) -> None:
    settings = ServerSettings(port=0, grace_s=0.2)
    with served({"tiny": tiny_bundle}, seats=2) as server, ExitStack() as stack:
        front = stack.enter_context(Running(build_front([server.url], settings), settings))
        stream, whole, late = (stack.enter_context(connection(front)) for _ in range(3))
        for opened, more in ((stream, {"stream": True}), (whole, {"stream": False})):
            opened.sendall(post(front, CHAT, json.dumps({**LONG, "n": 1, **more}).encode()))
        late.sendall(post(front, CHAT, b"", Content_Length="1000") + b"{")
        assert stream.recv(64)
        wait_until(lambda: server.service.shelf.loaded["tiny"].num_running == 2)
        wait_until(lambda: len(front.service._running) == 3)
        front.server.should_exit = True
        told, *refused = (received(opened) for opened in (stream, whole, late))
        assert b'"closing"' in told.split(b"data: ")[-1] and told.endswith(b"0\r\n\r\n")
        for answer in refused:
            assert status_of(answer) == 503 and b"retry-after: 5" in answer.lower() and b'"closing"' in answer
        wait_until(lambda: not server.service.shelf.loaded["tiny"].num_running)


class Slow:
    """A bundle that is loaded when it may be."""

    def __init__(self) -> None:
        self.may, self.began, self.closed = threading.Event(), threading.Event(), threading.Event()

    def load(self, _: str) -> "Slow":
        self.began.set()
        assert self.may.wait(60)
        return self

    def close(self) -> None:
        self.closed.set()


def test_a_server_that_ends_waits_for_no_load(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(Shelf, "_open", slow.load)

    async def end_while_loading() -> None:
        shelf = Shelf({"tiny": tiny_bundle}, ServerSettings(port=0, device_map="cpu", grace_s=0.05))
        loading = asyncio.create_task(shelf.load("tiny"))
        await asyncio.to_thread(slow.began.wait, 60)
        shelf.refuse()
        with pytest.raises(ApiError, match="closing") as told:  # before the grace is over, which is for the load
            await loading
        assert told.value.status == 503 and shelf.is_loading
        await shelf.close()
        assert not slow.closed.is_set()

    asyncio.run(end_while_loading())
    slow.may.set()
    assert slow.closed.wait(60), "what nobody waits for is closed by who loads it"


def test_what_was_loaded_just_before_the_grace_was_over_is_closed(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, usual = Slow(), asyncio.wait

    async def finish_meanwhile(loads: Any, timeout: float) -> Any:
        monkeypatch.setattr(asyncio, "wait", usual)
        slow.may.set()
        wait_until(lambda: not any(thread.name == "mirrorsd-load" for thread in threading.enumerate()))
        return set(), set(loads)

    async def end_while_loading() -> None:
        shelf = Shelf({"tiny": tiny_bundle}, ServerSettings(port=0, device_map="cpu"))
        loading = asyncio.create_task(shelf.load("tiny"))
        await asyncio.to_thread(slow.began.wait, 60)
        monkeypatch.setattr(asyncio, "wait", finish_meanwhile)
        await shelf.close()
        await loading
        assert slow.closed.is_set() and not shelf.loaded

    monkeypatch.setattr(Shelf, "_open", slow.load)
    asyncio.run(end_while_loading())


def test_a_second_signal_ends_a_server_that_is_loading(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[object] = []

    async def load_for_ever() -> None:
        settings = ServerSettings(port=0, device_map="cpu")
        app = build_app({"tiny": tiny_bundle}, settings)
        server = configured(app, settings)
        app.state.service.shelf._loads["tiny"] = asyncio.create_task(asyncio.Event().wait())
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit and not server.force_exit
        with monkeypatch.context() as watched:
            watched.setattr(signal, "signal", lambda *asked: ends.append(asked))
            watched.setattr(signal, "raise_signal", ends.append)
            server.handle_exit(signal.SIGTERM, None)

    asyncio.run(load_for_ever())
    assert ends == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]


def test_a_bundle_that_cannot_be_loaded_ends_the_server(tiny_bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mirror"
    shutil.copytree(tiny_bundle, broken)
    (broken / "tokenizer" / "tokenizer.json").write_text("{}")
    with Running({"broken": broken}, ServerSettings(**TINY)) as running:
        wait_until(lambda: running.server.should_exit)
        assert running.service.status in ("failed", "closing")
        assert "tokenizer" in str(running.service.failure)


def command(bundle: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "mirrorsd.cli", "serve", str(bundle), "--port", "0", "--device-map", "cpu", *more]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_command_serves_until_it_is_told_to_stop(tiny_bundle: Path) -> None:
    key = "a-key-of-enough-characters"
    environment = {**os.environ, "MIRRORSD_API_KEY": key}
    with subprocess.Popen(command(tiny_bundle), stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while line and "listening on" not in line:
            line = process.stderr.readline()
        url = line.split("listening on ")[1].split(";")[0]
        request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert json.load(urllib.request.urlopen(request, timeout=30))["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) in (0, -signal.SIGTERM)
    assert "Traceback" not in rest
    assert key not in line + rest


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--host", "0.0.0.0"), "needs an API key"),
        (("--api-key-file", "/nowhere/key"), "cannot be read"),
        (("--seats", "0"), "seats is 0"),
    ],
)
def test_the_command_refuses_what_would_be_open_or_cannot_be(
    tiny_bundle: Path, arguments: tuple[str, ...], message: str
) -> None:
    finished = subprocess.run(command(tiny_bundle, *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert message in finished.stderr
