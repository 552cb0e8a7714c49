"""Servers that are killed in the middle of texts: whether what the client has in the end is the undisturbed answer.

    python bench/claims/serving/kills.py pair.mirror --kills 200 --output kills.json

Two servers stand behind a front, each a process of its own: `mirrorsd serve`, `mirrorsd front`. One server decodes
plainly, the other by mirror decoding. In the middle of an answer the server that writes it gets a SIGKILL, and is
started anew at once; what it had sent of the next mark is torn. Texts, places and what is compared are those of
`killed.py`: all that the client sees, usage and log-probabilities too. A third server gives the undisturbed answers.
"""

import argparse
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from mirrorsd.bench.claims.serving.commands import Command
from mirrorsd.bench.claims.serving.killed import METHODS, Breaks, asked, compare, is_stream, tell, torn
from mirrorsd.server.transport.resuming import FRAME_END

_ANSWER_S = 120.0
_BETWEEN_TWO = ("host", "connection", "content-length", "transfer-encoding")
"""Headers that are of one connection only."""


class Gate(ThreadingHTTPServer):
    """Stands between the front and a server: says how that one decodes, counts marks, and kills it behind one."""

    daemon_threads = True

    def __init__(self, server: Command, method: str, breaks: Breaks) -> None:
        """Listen; each request is passed on by a thread of its own."""
        super().__init__(("127.0.0.1", 0), _Passing)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.behind, self.method, self.breaks = server, method, breaks
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kill(self) -> None:
        """Kill the server, and start it anew."""
        self.breaks.counts[self.method] += 1
        self.behind.kill()
        self.behind.start()


class _Passing(BaseHTTPRequestHandler):
    """One connection of the front: an answer, which ends with it."""

    server: Gate

    def do_POST(self) -> None:
        """Pass on a request for a text, and how it is decoded."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"]))) | {"method": self.server.method}
        self._pass_on(json.dumps(body))

    def do_GET(self) -> None:
        """Pass on a question about the server."""
        self._pass_on(None)

    def _pass_on(self, body: str | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _BETWEEN_TWO}
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind.port, timeout=_ANSWER_S)
        try:
            behind.request(self.command, self.path, body, headers)
            self._answer(behind.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # nobody is there: the front finds that out by itself
        finally:
            behind.close()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _BETWEEN_TWO:
                self.send_header(name, value)
        self.end_headers()
        if not is_stream(answer.headers["content-type"]):
            self.wfile.write(answer.read())
            return
        marks = self.server.breaks.marks()
        for frame in _frames(answer):
            if marks.is_last(frame):
                self.wfile.write(torn(frame))
                self.server.kill()
                return
            self.wfile.write(frame + FRAME_END)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _frames(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    rest = b""
    while piece := answer.read1(1 << 16):
        *frames, rest = (rest + piece).split(FRAME_END)
        yield from frames


def main() -> int:
    """Ask, kill, compare, print, write the report; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--kills", type=int, default=200, help="texts whose server is killed, a fifth of them twice")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    breaks, started = Breaks(), perf_counter()
    with ExitStack() as stack:
        serve = ("serve", f"killed={given.bundle}", "--device-map", given.device_map, "--seats", "1")
        servers = [stack.enter_context(Command(*serve)) for _ in (*METHODS, "undisturbed")]
        gates = [Gate(server, method, breaks) for server, method in zip(servers, METHODS, strict=False)]
        front = stack.enter_context(Command("front", *(gate.url for gate in gates)))
        for server in servers:
            server.wait()
        front.wait()
        report = compare(front.url, servers[-1].url, breaks, list(islice(asked(), given.kills)))
    return tell(report | {"seconds": round(perf_counter() - started)}, given.output)


if __name__ == "__main__":
    raise SystemExit(main())
