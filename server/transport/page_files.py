"""The page's files: read once from one folder, so that no path of a request ever touches the file system."""

import hashlib
from pathlib import Path

from mirrorsd.server.errors import ApiError
from mirrorsd.server.transport.exchange import Exchange

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageFiles:
    """Every file of a folder whose type is known, by its path in there."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.is_file() and not path.is_symlink() and path.suffix in _TYPES:
                self._files[path.relative_to(folder).as_posix()] = _described(path)

    async def send(self, exchange: Exchange, name: str) -> None:
        """Answer with a file.

        Raises:
            ApiError: there is none of this name.
        """
        if name not in self._files:
            raise ApiError(404, "There is no such file.", code="not_found")
        body, headers = self._files[name]
        if exchange.request.headers.get("if-none-match") == headers["etag"]:
            await exchange.whole(b"", headers, 304)
        else:
            await exchange.whole(body, headers)


def _described(path: Path) -> tuple[bytes, dict[str, str]]:
    body = path.read_bytes()
    headers = {
        "content-type": _TYPES[path.suffix],
        "etag": f'"{hashlib.sha256(body).hexdigest()[:24]}"',
        "cache-control": "no-cache",
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return body, headers
