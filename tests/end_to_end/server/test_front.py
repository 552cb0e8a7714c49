"""A front before servers that die: the client's text is the undisturbed one, and no request fails."""

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.bench.claims.serving import killed
from mirrorsd.bench.claims.serving.commands import Command
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server import Limits, Running, ServerSettings
from mirrorsd.server.front import build_front, servers_of
from mirrorsd.server.transport.resuming import read_mark
from mirrorsd.tests.end_to_end.server.serving_here import CHAT, post, raw, served, status_of
from mirrorsd.tests.end_to_end.server.test_resumed_answers import FOX, WAYS, text_of, unchunked, usages

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Start = Callable[..., list[Command]]


@pytest.fixture
def start(tiny_bundle: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(count: int, *more: str) -> list[Command]:
            words = ("serve", f"tiny={tiny_bundle}", "--device-map", "cpu", *more)
            found = [stack.enter_context(Command(*words)) for _ in range(count)]
            for server in found:
                server.wait()
            return found

        yield begin


def front_of(urls: list[str], **limits: float) -> Running:
    settings = ServerSettings(port=0, limits=Limits(**limits))  # type: ignore[arg-type]
    return Running(build_front(urls, settings), settings)


def frames(answer: bytes) -> list[bytes]:
    return list(filter(None, unchunked(answer.split(b"\r\n\r\n", 1)[1]).split(b"\n\n")))


class Cutting:
    """Stands before a server, and breaks a connection off behind so many bytes of an answer."""

    def __init__(self, *, is_single: bool = False) -> None:
        """With `is_single` nobody is let through behind the first connection that was broken off."""
        self._is_single, self.refuses = is_single, False
        self.left: int | None = None
        self.num_cut = self.target = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"http://{self.host}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        if self.num_cut and (self._is_single or self.refuses):
            client.close()
            return
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            while piece := server.recv(4096):
                if self.left is not None:
                    if len(piece) >= self.left:
                        client.sendall(piece[: self.left])
                        self.left, self.num_cut = None, self.num_cut + 1
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    self.left -= len(piece)
                client.sendall(piece)

    def close(self) -> None:
        self._listening.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(4096):
            target.sendall(piece)
    except OSError:
        pass


def asked(front: Running, way: str, **more: Any) -> bytes:
    path, body = WAYS[way]
    return raw(front, post(front, path, json.dumps({"model": "tiny", **body, **more}).encode()))


@pytest.fixture(scope="module")
def behind(tiny_bundle: Path) -> Iterator[tuple[Cutting, Running]]:
    """A server, and what breaks the connections to it off."""
    cutting = Cutting()
    with served({"tiny": tiny_bundle}, allowed_hosts=(cutting.host,), speculation={}) as running:
        cutting.target = running.port
        yield cutting, running
    cutting.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_breaks_anywhere_changes_nothing(behind: tuple[Cutting, Running], way: str) -> None:
    cutting, running = behind
    with front_of([cutting.url, running.url]) as front:
        more = {"seed": 7} if "seed" not in WAYS[way][1] and WAYS[way][1].get("temperature") else {}
        more["stream"] = True
        whole, num_cut = asked(front, way, method="plain", **more), cutting.num_cut
        for number, method in enumerate(("plain", "mirror", "auto", "serial", "lookup")):
            front.service._first, cutting.left = 0, 200 + number * len(whole) // 8
            found = asked(front, way, method=method, **more)
            assert status_of(found) == 200
            assert without_ids(text_of(frames(found))) == without_ids(text_of(frames(whole))), number
            assert usages(frames(found)) == usages(frames(whole))
            assert b": mirrorsd" not in found
        assert cutting.num_cut > num_cut
        cutting.left = None


@pytest.mark.parametrize("num_choices", (1, 2))
def test_what_a_client_goes_on_from_stands_before_what_was_sent(
    behind: tuple[Cutting, Running], num_choices: int
) -> None:
    """A client that brings ids along, as one whose connection broke does, loses no other, and gets none twice."""
    cutting, running = behind
    body = {"model": "tiny", "messages": FOX, "max_tokens": 48, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    body |= {"n": num_choices, "stream": True, "stream_options": {"include_usage": True}}
    told = frames(raw(running, post(running, CHAT, json.dumps(body).encode(), x_mirrorsd_resume="{}")))
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    for mark in filter(None, map(read_mark, told)):
        if "choice" in mark:
            ids[mark["choice"]] += mark["ids"]
    body["continue_from"] = [own[: 10 + 5 * choice] for choice, own in enumerate(ids)]
    whole = raw(running, post(running, CHAT, json.dumps(body).encode()))
    for parts in (3, 2, 1):
        with front_of([cutting.url, running.url]) as front:
            cutting.left, num_cut = len(whole) // parts, cutting.num_cut
            found = raw(front, post(front, CHAT, json.dumps(body).encode()))
        assert cutting.num_cut == num_cut + 1
        assert (text_of(frames(found)), usages(frames(found))) == (text_of(frames(whole)), usages(frames(whole)))


def test_a_kept_answer_that_breaks_off_ends_with_an_error_and_says_nothing_twice(
    behind: tuple[Cutting, Running],
) -> None:
    cutting = behind[0]
    key = "mirrored-answer-0001"
    body = {"model": "tiny", "messages": FOX, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with front_of([cutting.url]) as front:
        asked = {**body, "temperature": 0, "mirror_keep": key}
        whole = text_of(frames(raw(front, post(front, CHAT, json.dumps(asked).encode()))))
        request = f"GET /v1/answers/{key} HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nConnection: close\r\n\r\n"
        kept = frames(raw(front, request.encode()))
        assert text_of(kept) == whole and not any(map(read_mark, kept))
        cutting.left = 9000
        torn = frames(raw(front, request.encode()))
    cutting.left = None
    assert 0 < len(torn) < len(kept) and torn[:-1] == kept[: len(torn) - 1]
    assert b"answer_broken_off" in torn[-1]


@pytest.mark.parametrize("is_stream", (True, False))
def test_what_another_server_refuses_is_not_the_answer_of_a_text_that_broke_off(
    tiny_bundle: Path, is_stream: bool
) -> None:
    """The second server has the bundle under another name: it refuses, and is not asked first from then on."""
    cutting = Cutting()
    body = {"model": "tiny", **WAYS["greedy"][1], "max_tokens": 200}
    document = json.dumps({**body, "stream": is_stream}).encode()
    with (
        served({"tiny": tiny_bundle}, allowed_hosts=(cutting.host,)) as first,
        served({"other": tiny_bundle}) as other,
        front_of([cutting.url, other.url], elsewhere_s=1) as front,
    ):
        cutting.target, cutting.left = first.port, 9000
        cutting.refuses = True
        answer = raw(front, post(front, CHAT, document))
        assert b"text_not_continued" in answer and b"There is no such model here" in answer
        assert status_of(answer) == (200 if is_stream else 503)
        assert status_of(raw(front, post(front, CHAT, document))) == 404
        cutting.refuses = False
        assert status_of(raw(front, post(front, CHAT, document))) == 200
    cutting.close()


def test_a_kept_answer_is_found_and_ended_at_whichever_server_has_it(tiny_bundle: Path) -> None:
    key = "mirrored-answer-0002"
    body = {"model": "tiny", "messages": FOX, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    ask = "{} /v1/answers/" + key + " HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\n\r\n"
    with (
        served({"tiny": tiny_bundle}) as first,
        served({"tiny": tiny_bundle}) as second,
        front_of([first.url, second.url]) as front,
    ):
        assert status_of(raw(front, ask.format("GET", front.port).encode())) == 204
        assert b'"cancelled": false' in raw(front, ask.format("DELETE", front.port).encode())
        whole = text_of(frames(raw(second, post(second, CHAT, json.dumps(body | {"mirror_keep": key}).encode()))))
        assert text_of(frames(raw(front, ask.format("GET", front.port).encode()))) == whole
        assert front.service._first == 0, "the first one has not failed"
        front.service._first = 1
        again = raw(front, post(front, CHAT, json.dumps(body | {"mirror_keep": key}).encode()))
        assert status_of(again) == 409 and b'"in_use"' in again
        front.service._first = 0
        assert status_of(raw(first, ask.format("GET", first.port).encode())) == 204
        assert b'"cancelled": true' in raw(front, ask.format("DELETE", front.port).encode())


def test_a_front_before_a_front_is_refused_in_words(serving: Running) -> None:
    with front_of([serving.url]) as inner, front_of([inner.url]) as outer:
        for is_stream in (True, False):
            body = {"model": "tiny", **WAYS["greedy"][1], "stream": is_stream}
            answer = raw(outer, post(outer, CHAT, json.dumps(body).encode()))
            assert status_of(answer) == 400 and b"front_behind_front" in answer


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(found) for name, found in value.items() if name not in ("id", "item_id", "call_id")}
    return [without_ids(found) for found in value] if isinstance(value, list) else value


def test_killed_in_the_middle_twice_running(start: Start) -> None:
    """Streams and whole answers, greedy and sampled; the last server is a plain one, and has read nothing before."""
    body = {"messages": FOX, "max_tokens": 400, "ignore_eos": True, "model": "tiny"}
    first, second, third = start(3)
    with front_of([first.url, second.url, third.url]) as front:

        def ask(number: int, **more: Any) -> bytes:
            temperature = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
            is_stream, method = number < 4, ("mirror", "plain")[number // 2 % 2]
            document = {**body, **temperature, "stream": is_stream, "method": method, **more}
            return raw(front, post(front, CHAT, json.dumps(document).encode()))

        with ThreadPoolExecutor(6) as pool:
            expected = list(pool.map(ask, range(6)))
            running = [pool.submit(ask, number) for number in range(6)]
            time.sleep(0.3)
            first.kill()
            time.sleep(0.4)
            second.kill()
            found = [future.result() for future in running]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert status_of(one) == status_of(other) == 200, one
        if number < 4:
            assert text_of(frames(one)) == text_of(frames(other))
            assert one.endswith(b"0\r\n\r\n")
        else:
            documents = [json.loads(answer.split(b"\r\n\r\n", 1)[1]) for answer in (one, other)]
            assert documents[0]["choices"] == documents[1]["choices"]
            assert documents[0]["usage"]["total_tokens"] == documents[1]["usage"]["total_tokens"]


def test_a_body_that_is_too_long_is_refused_in_words() -> None:
    """A client that sends all before it reads would see a broken connection."""
    with front_of(["http://127.0.0.1:9"], body_bytes=1 << 20) as front:
        asked = urllib.request.Request(front.url + CHAT, bytes(3 << 20), {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="413") as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert json.load(refused.value)["error"]["code"] == "body_too_large"


def test_a_server_that_is_told_to_stop_fails_no_request(start: Start) -> None:
    """Eight users ask one question after the other; what outlasts the first server's grace goes on at the second."""
    first, second = start(2, "--seats", "4", "--grace", "0.2")
    document = {
        "messages": FOX,
        "max_tokens": 60,
        "ignore_eos": True,
        "model": "tiny",
        "temperature": 0,
        "stream": True,
    }
    with front_of([first.url, second.url]) as front:

        def ask(_: int) -> bytes:
            return raw(front, post(front, CHAT, json.dumps(document).encode()))

        with ThreadPoolExecutor(8) as pool:
            expected = text_of(frames(ask(0)))
            running = [pool.submit(ask, number) for number in range(32)]
            time.sleep(0.5)
            first.process.terminate()
            answers = [future.result() for future in running]
        first.process.wait(30)
    assert [text_of(frames(answer)) == expected for answer in answers] == [True] * 32
    assert all(b"[DONE]" in answer for answer in answers)


def test_a_text_is_not_gone_on_with_where_the_fingerprint_differs(tiny_bundle: Path) -> None:
    """The padding of passes is part of it: what one server has begun the other refuses, and the client is told."""
    body = {**WAYS["greedy"][1], "model": "tiny", "max_tokens": 200}
    with served({"tiny": tiny_bundle}, speculation={"pad_rows_to": 16}) as other:
        for is_stream in (True, False):
            once = Cutting(is_single=True)
            with (
                served({"tiny": tiny_bundle}, allowed_hosts=(once.host,), speculation={}) as first,
                front_of([once.url, other.url], elsewhere_s=120) as front,
            ):
                once.target, once.left = first.port, 9000
                started = time.monotonic()
                answer = raw(front, post(front, CHAT, json.dumps({**body, "stream": is_stream}).encode()))
            assert time.monotonic() - started < 60, "who differs will differ: it is not asked until the deadline"
            assert b"text_not_continued" in answer
            assert other.service.shelf.loaded["tiny"].fingerprint.encode() in answer
            assert b"[DONE]" not in answer
            assert status_of(answer) == (200 if is_stream else 503)


def test_the_campaign_of_kills_finds_no_text_that_differs(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "killed.json"
    monkeypatch.setattr("sys.argv", ["killed.py", str(tiny_bundle), "--texts", "20", "--output", str(report)])
    assert killed.main() == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["equal"] == 20
    assert {place: row["broken_off"] / row["texts"] for place, row in found["by_place"].items()} == {
        **dict.fromkeys(killed.PLACES, 1.0),
        "twice": 2.0,
    }


def test_no_server_at_all_is_an_error_that_says_so() -> None:
    with front_of([f"http://127.0.0.1:{free_port()}"], elsewhere_s=0.2) as front:
        answer = raw(front, post(front, CHAT, b'{"messages": []}'))
        assert status_of(answer) == 503
        assert b"No server answers" in answer


def test_what_is_no_text_waits_for_no_server() -> None:
    """Who asks for the health of a front is a balancer, with a deadline of its own."""
    started = time.monotonic()
    with front_of([f"http://127.0.0.1:{free_port()}"], elsewhere_s=60) as front:
        answer = raw(front, f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\n\r\n".encode())
    assert status_of(answer) == 503
    assert time.monotonic() - started < 30


def test_everything_else_is_passed_on_as_it_is(serving: Running) -> None:
    with front_of([serving.url]) as front:
        for path in ("/v1/models", "/health", "/openapi.json", "/", "/page/page.css", "/nowhere"):
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n"
            direct, passed = (raw(one, (request % one.port).encode()) for one in (serving, front))
            assert status_of(direct) == status_of(passed)
            assert direct.split(b"\r\n\r\n", 1)[1] == passed.split(b"\r\n\r\n", 1)[1]
        refused = raw(front, post(front, CHAT, b'{"messages": 5}'))
        assert (status_of(refused), b'"param"' in refused) == (400, True)
        foreign = raw(front, post(front, CHAT, b"{}", Host="evil.com"))
        assert status_of(foreign) == 421
        page = raw(
            front, post(front, CHAT, json.dumps({"model": "tiny", **WAYS["greedy"][1]}).encode(), Origin=front.url)
        )
        assert status_of(page) == 200


@pytest.mark.parametrize(
    "address",
    (
        *("", "127.0.0.1:80", "ftp://a", "http://", "http://a?b", "http://u:p@a", "http://a\n", "http://a b"),
        *("http://a:b", "http://[::1", "http://a:99999", "http://a:0", "http://a:80 "),
    ),
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        servers_of([address])


def test_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="No server was given"):
        servers_of([])
