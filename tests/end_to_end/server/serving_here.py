"""Servers on free ports of this machine, and raw connections to them."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_until

from mirrorsd.server import Limits, Running, ServerSettings

TINY: dict[str, Any] = {"port": 0, "device_map": "cpu", "speculation": {"pad_rows_to": 8}}
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2}
LIMITS = Limits(head_s=1.0, body_s=1.0, read_s=2.0, send_s=1.0, idle_s=1.0, ping_s=0.5, body_bytes=1 << 20)


@contextmanager
def served(bundles: dict[str, Path], **settings: Any) -> Iterator[Running]:
    """A server that is ready."""
    with Running(bundles, ServerSettings(**{**TINY, **settings})) as running:
        wait_until(lambda: running.service.status != "loading")
        assert running.service.status == "ok"
        yield running


@contextmanager
def connection(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as found:
        yield found


def raw(running: Running, request: bytes, *, shut: bool = False) -> bytes:
    """All that is answered to these bytes, up to the end of the connection."""
    with connection(running) as opened:
        opened.sendall(request)
        if shut:
            opened.shutdown(socket.SHUT_WR)
        return received(opened)


def received(opened: socket.socket) -> bytes:
    found = b""
    try:
        while piece := opened.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def post(running: Running, path: str, body: bytes, **headers: str) -> bytes:
    """A request as bytes; headers of the same name as a usual one take its place, None leaves it away."""
    usual = {
        "Host": f"127.0.0.1:{running.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in {**usual, **given}.items() if value != ""]
    return f"POST {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


def chat(running: Running, body: Any = None, **headers: str) -> bytes:
    document = body if isinstance(body, bytes) else json.dumps({**BODY, **(body or {})}).encode()
    return raw(running, post(running, CHAT, document, **headers))


def get(running: Running, path: str, *lines: str, host: str | None = None) -> bytes:
    head = [f"GET {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{running.port}'}", "Connection: close", *lines]
    return raw(running, "\r\n".join(head).encode("latin-1") + b"\r\n\r\n")
