"""Connections that are slow, cut, doubled or ambiguous: they are ended, and nobody else notices."""

import json
import resource
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from waiting import LOOK_S, wait_until

from mirrorsd.server import Limits, Running, ServerSettings
from mirrorsd.server.answers.choices import Choice
from mirrorsd.server.service import Service
from mirrorsd.tests.end_to_end.server.serving_here import (
    BODY,
    CHAT,
    LIMITS,
    chat,
    connection,
    get,
    post,
    raw,
    received,
    served,
    status_of,
)

SOON_S = 30.0
"""Every limit here is a second; a busy machine may need longer to see to it."""
pytestmark = pytest.mark.usefixtures("as_well_as_before")


def test_a_head_that_drips_is_cut_off(serving: Running) -> None:
    with connection(serving) as opened:
        started = time.monotonic()
        opened.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            while time.monotonic() - started < SOON_S:
                opened.sendall(b"X: y\r\n")
                time.sleep(0.1)


def test_a_body_that_drips_is_cut_off(serving: Running) -> None:
    with connection(serving) as opened:
        opened.sendall(post(serving, CHAT, b"", Content_Length="1000") + b"{")
        started = time.monotonic()
        assert status_of(received(opened)) == 408
        assert 0.5 < time.monotonic() - started < SOON_S


def begin_without_body(opened: socket.socket, running: Running, length: int) -> None:
    """Ask for what is answered before the request's body has come."""
    head = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nContent-Length: {length}\r\n\r\n"
    opened.sendall(head.encode())
    found = b""
    while b'"ok"' not in found:
        found += opened.recv(4096)


def test_a_body_that_drips_behind_its_answer_is_cut_off(serving: Running) -> None:
    with connection(serving) as opened:
        begin_without_body(opened, serving, 1_000_000)
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < SOON_S:
                opened.sendall(b"x")
                time.sleep(0.1)


@pytest.mark.parametrize("number", [0, 1])
def test_a_connection_is_idle_once_a_body_has_come_behind_its_answer(serving: Running, number: int) -> None:
    """However often that was so: what follows is answered, and then the connection is closed as any other."""
    with connection(serving) as opened:
        for _ in range(number):
            begin_without_body(opened, serving, 2)
            opened.sendall(b"{}")
        begin_without_body(opened, serving, 3)
        opened.sendall(b"{")
        opened.sendall(b" }")
        assert received(opened) == b""


def test_an_idle_connection_is_closed_and_so_is_one_between_two_heads(serving: Running) -> None:
    with connection(serving) as opened:
        assert received(opened) == b""
    with connection(serving) as opened:
        opened.sendall(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{serving.port}\r\n\r\nGET /he".encode())
        started = time.monotonic()
        assert status_of(received(opened)) == 200
        assert time.monotonic() - started < SOON_S


def test_a_client_that_does_not_read_is_cut_off_and_its_text_ends(serving: Running) -> None:
    bundle = serving.service.shelf.loaded["tiny"]
    body = {"stream": True, "max_tokens": 480, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", serving.port))
        opened.sendall(post(serving, CHAT, json.dumps({**BODY, **body}).encode()))
        wait_until(lambda: bundle.num_running)
        wait_until(lambda: not bundle.num_running)


def test_many_connections_are_bounded_and_do_no_harm(serving: Running) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        for _ in range(min(1000, soft // 4)):
            try:
                stack.enter_context(connection(serving))
            except OSError:
                break
        connections = serving.server.server_state.connections
        wait_until(lambda: connections)
        time.sleep(0.3)  # what is one too many is closed in the next round of the loop
        most = serving.service.most_connections
        wait_until(lambda: len(connections) <= most, "too many are open", looks=int(LIMITS.idle_s / 2 / LOOK_S))
    wait_until(lambda: not connections)


def test_one_connection_too_many_is_told_so(tiny_bundle: Path) -> None:
    """One is for the seat, and two are for others."""
    with served({"tiny": tiny_bundle}, seats=1, queue=0, limits=Limits(connections=2)) as running:
        connections = running.server.server_state.connections
        wait_until(lambda: not connections)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connection(running))
            wait_until(lambda: len(connections) == 3)
            for answer in (get(running, "/health"), chat(running)):
                assert status_of(answer) == 503 and b"retry-after: 5" in answer.lower()
                assert b'"too_many_connections"' in answer
            assert len(connections) == 3
        wait_until(lambda: not connections)
        assert status_of(get(running, "/health")) == 200


@pytest.mark.parametrize(("names", "most"), [(("one",), 256 + 1002), (("one", "two"), 256 + 2 * 1002)])
def test_whoever_may_wait_in_a_queue_may_be_connected(names: tuple[str, ...], most: int) -> None:
    service = Service({name: Path(name) for name in names}, ServerSettings(seats=2, queue=1000))
    assert service.most_connections == most


def test_half_closed_and_reset_connections_free_their_seat(serving: Running) -> None:
    body = json.dumps({**BODY, "stream": True, "max_tokens": 480, "ignore_eos": True}).encode()
    bundle = serving.service.shelf.loaded["tiny"]
    for number in range(6):
        with connection(serving) as opened:
            opened.sendall(post(serving, CHAT, body))
            opened.recv(10 + 40 * number)
            if number % 2:
                opened.shutdown(socket.SHUT_WR)
            else:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not bundle.num_running)


def test_pipelined_requests_are_answered_in_order(serving: Running) -> None:
    host = f"Host: 127.0.0.1:{serving.port}\r\n"
    request = f"GET /health HTTP/1.1\r\n{host}\r\n" * 3 + f"GET /v1/models HTTP/1.1\r\n{host}Connection: close\r\n\r\n"
    answer = raw(serving, request.encode())
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.index(b'"status"') < answer.index(b'"object"')


@pytest.mark.parametrize(
    "head",
    [
        *(
            "Content-Length: -1",
            "Content-Length: 5\r\nContent-Length: 6",
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
        ),
        *("Transfer-Encoding: chunked, gzip", "Content-Length: 0x10", "X : y", "X\x01: y", " folded: x"),
    ],
)
def test_ambiguous_lengths_and_broken_heads_are_refused(serving: Running, head: str) -> None:
    lines = [f"POST {CHAT} HTTP/1.1", f"Host: 127.0.0.1:{serving.port}", "Content-Type: application/json", head]
    request = "\r\n".join([*lines, "", "0", "", ""])
    assert status_of(raw(serving, request.encode("latin-1"))) in (0, 400, 408, 413, 415, 501)


def test_bad_chunk_sizes_are_refused(serving: Running) -> None:
    head = post(serving, CHAT, b"", Content_Length="", Transfer_Encoding="chunked")
    for chunk in (b"zz\r\nx\r\n", b"-1\r\nx\r\n", b"f" * 40 + b"\r\nx\r\n"):
        assert status_of(raw(serving, head + chunk, shut=True)) in (0, 400)


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(serving: Running) -> None:
    body = json.dumps(BODY).encode()
    with connection(serving) as opened:
        opened.sendall(post(serving, CHAT, b"", Content_Length=str(len(body)), Expect="100-continue"))
        assert opened.recv(100).startswith(b"HTTP/1.1 100")
        opened.sendall(body)
        assert b"HTTP/1.1 200" in received(opened)


def test_web_sockets_are_not_spoken(serving: Running) -> None:
    answer = get(
        serving, "/v1/chat/completions", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"
    )
    assert status_of(answer) in (400, 404, 405, 426)


def test_a_path_says_which_methods_it_has(serving: Running) -> None:
    """As HTTP wants it of a 405: those of all routes that the path has."""
    allowed = {"/v1/answers/an-answer": b"DELETE, GET, HEAD", "//v1/completions/": b"POST", "/health": b"GET, HEAD"}
    for path, methods in allowed.items():
        answer = raw(serving, post(serving, path, b"{}").replace(b"POST ", b"PUT ", 1))
        assert status_of(answer) == 405
        assert b"allow: " + methods + b"\r\n" in answer


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_stream_that_ends_by_a_fault_of_ours_says_so(
    serving: Running, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """As a kept one does: a client could not tell it from a broken network."""

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Choice, "take", fail)
    answer = chat(serving, {"stream": True} | ({"mirror_keep": "a-fault-of-ours-0001"} if is_kept else {}))
    assert status_of(answer) == 200 and answer.count(b'"internal_error"') == 1 and b"[DONE]" not in answer
    assert answer.endswith(b"0\r\n\r\n")
