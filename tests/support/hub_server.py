"""A server of the hub's protocol on this machine, as far as fetching a model needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers for the repositories in `folder`, two levels deep; those named in `gated` want an agreement first."""

    def __init__(self, *arguments: Any, folder: Path, gated: tuple[str, ...], asked: list[str]) -> None:
        self.folder, self.gated, self.asked = folder, gated, asked
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.asked.append(f"{self.command} {path}")
        parts = path.split("/")
        repository = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        rest = parts[4:] if parts[:2] == ["api", "models"] else parts[2:]
        folder = self.folder / repository
        if not folder.is_dir():
            return self._refuse(404, "RepoNotFound")
        if repository in self.gated:
            return self._refuse(403, "GatedRepo")
        if len(rest) > 1 and rest[0] in ("revision", "tree", "resolve") and rest[1] not in ("main", SHA):
            return self._refuse(404, "RevisionNotFound")
        if parts[0] != "api":
            return self._file(folder / "/".join(rest[2:]), with_body=with_body)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if "tree" in rest:
            return self._json([self._entry(folder, file) for file in files])
        siblings = [{"rfilename": file.relative_to(folder).as_posix(), "size": file.stat().st_size} for file in files]
        return self._json({"id": repository, "sha": SHA, "siblings": siblings, "gated": False, "private": False})

    def _entry(self, folder: Path, file: Path) -> dict[str, Any]:
        name = file.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}

    def _file(self, file: Path, *, with_body: bool) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("X-Repo-Commit", SHA)
        self._send(content if with_body else b"", len(content))
        return None

    def _json(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._send(content, len(content))

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self._send(b"", 0)

    def _send(self, content: bytes, length: int) -> None:
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serve(folder: Path, gated: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and what it has been asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder=folder, gated=gated, asked=asked))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
