"""What a front asks for, and what it hands on, beside bodies."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import raw
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
