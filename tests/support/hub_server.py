"""A server of the hub's protocol on this machine, as far as fetching and pushing models needs it, and its bad days."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".bin", ".onnx", ".safetensors")
"""Kept by their SHA-256, as git-lfs does."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong.

    Attributes:
        most_bytes: of a file's content that one answer brings before it breaks off; None for all.
        breaks: how many answers break off; the others are whole.
        spoilt: files whose content arrives changed, at its full length.
        has_ranges: whether a part can be asked for.
        has_heads: whether a HEAD is answered.
        sha: the commit that the repositories are at.
        token: who may push; None for everybody.
    """

    most_bytes: int | None = None
    breaks: int = 0
    spoilt: set[str] = field(default_factory=set)
    has_ranges: bool = True
    has_heads: bool = True
    sha: str = SHA
    token: str | None = None


class Hub(BaseHTTPRequestHandler):
    """Answers for the repositories in `folder`, two levels deep; those named in `gated` want an agreement first."""

    def __init__(self, *arguments: Any, folder: Path, gated: tuple[str, ...], asked: list[str], faults: Faults) -> None:
        self.folder, self.gated, self.asked, self.faults = folder, gated, asked, faults
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        if self.faults.has_heads:
            self._answer(with_body=False)
        else:
            self._refuse(405, "")

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path).strip("/")
        self.asked.append(f"POST {path}")
        if self.faults.token and self.headers.get("Authorization") != f"Bearer {self.faults.token}":
            return self._refuse(401, "")
        if path == "api/repos/create":
            wanted = json.loads(content)
            repository = f"{wanted['organization']}/{wanted['name']}"
            is_new = not (self.folder / repository).is_dir()
            (self.folder / repository).mkdir(parents=True, exist_ok=True)
            if is_new and (wanted.get("private") or wanted.get("visibility") == "private"):
                (self.folder / ".private" / repository).mkdir(parents=True)
            return self._json({"url": f"{self._own}/{repository}", "id": repository}, 200 if is_new else 409)
        if path.endswith("info/lfs/objects/batch"):
            return self._json(
                {"transfer": "basic", "objects": [self._upload(one) for one in json.loads(content)["objects"]]}
            )
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        folder = self.folder / "/".join(path.split("/")[2:4])
        if "/preupload/" in path:
            modes = ({"path": file["path"], "shouldIgnore": False} for file in json.loads(content)["files"])
            return self._json(
                {"files": [{**one, "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular"} for one in modes]}
            )
        for line in content.splitlines():
            self._commit(folder, **json.loads(line))
        where = f"{self._own}/{folder.parent.name}/{folder.name}/commit/{self.faults.sha}"
        return self._json({"commitUrl": where, "commitOid": self.faults.sha})

    def do_PUT(self) -> None:
        path = self.folder / urlsplit(self.path).path.strip("/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self._json({})

    def _upload(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self._own}/.stored/{one['oid']}", "header": {}}}}

    def _commit(self, folder: Path, key: str, value: dict[str, Any]) -> None:
        if key in ("file", "lfsFile"):
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            is_small = key == "file"
            stored = self.folder / ".stored" / value.get("oid", "")
            path.write_bytes(base64.b64decode(value["content"]) if is_small else stored.read_bytes())
        elif key == "deletedFile":
            (folder / value["path"]).unlink()

    @property
    def _own(self) -> str:
        return f"http://{self.headers['Host']}"

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        part = f" {self.headers['Range']}" if self.headers["Range"] else ""
        self.asked.append(f"{self.command} {path}{part}")
        parts = path.split("/")
        if path == "api/models":
            return self._list(parse_qs(urlsplit(self.path).query).get("filter", [""])[0])
        repository = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        rest = parts[4:] if parts[:2] == ["api", "models"] else parts[2:]
        folder = self.folder / repository
        if (self.folder / path).is_file():
            return self._file(self.folder / path, with_body=with_body)
        if not folder.is_dir():
            return self._refuse(404, "RepoNotFound")
        if repository in self.gated:
            return self._refuse(403, "GatedRepo")
        if len(rest) > 1 and rest[0] in ("revision", "tree", "resolve") and rest[1] not in ("main", self.faults.sha):
            return self._refuse(404, "RevisionNotFound")
        if parts[0] != "api":
            return self._file(folder / "/".join(rest[2:]), with_body=with_body)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if "tree" in rest:
            return self._json([self._entry(folder, file) for file in files])
        return self._json(self._about(repository, files))

    def _list(self, tag: str) -> None:
        cards = self.folder.glob("*/*/README.md")
        tagged = [card.parent for card in sorted(cards) if f"- {tag}\n" in card.read_text(encoding="utf-8")]
        named = (folder.relative_to(self.folder).as_posix() for folder in tagged)
        sizes = [sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in tagged]
        return self._json([{"id": name, "usedStorage": size} for name, size in zip(named, sizes, strict=True)])

    def _about(self, repository: str, files: list[Path]) -> dict[str, Any]:
        folder = self.folder / repository
        siblings = []
        for file in files:
            one: dict[str, Any] = {"rfilename": file.relative_to(folder).as_posix(), "size": file.stat().st_size}
            if file.name.endswith(LARGE):
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                one["lfs"] = {"size": one["size"], "sha256": digest, "pointerSize": 134}
            siblings.append(one)
        sha, is_private = self.faults.sha, (self.folder / ".private" / repository).is_dir()
        return {"id": repository, "sha": sha, "siblings": siblings, "gated": False, "private": is_private}

    def _entry(self, folder: Path, file: Path) -> dict[str, Any]:
        name = file.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}

    def _file(self, file: Path, *, with_body: bool) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content, whole = file.read_bytes(), file.stat().st_size
        if file.name in self.faults.spoilt:
            content = bytes(byte ^ 1 for byte in content)
        first = 0
        asked = self.headers["Range"]
        if asked and self.faults.has_ranges and self.headers["If-Range"] in (None, f'"{_digest(file)}"'):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            if first >= whole:
                return self._refuse(416, "")
            content = content[first:]
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{whole - 1}/{whole}")
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("X-Repo-Commit", self.faults.sha)
        length = len(content)
        if with_body and self.faults.breaks > 0 and self.faults.most_bytes is not None:
            self.faults.breaks -= length > self.faults.most_bytes
            content = content[: self.faults.most_bytes]
            self.close_connection = True
        self._send(content if with_body else b"", length)
        return None

    def _json(self, document: object, status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
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
def serve(folder: Path, gated: tuple[str, ...] = (), faults: Faults | None = None) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and what it has been asked for."""
    asked: list[str] = []
    answer = partial(Hub, folder=folder, gated=gated, asked=asked, faults=faults or Faults())
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
