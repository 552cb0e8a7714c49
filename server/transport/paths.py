"""Which path a request means: read once, before anybody decides by it, and written anew for whoever asks further.

A path may be spelled in many ways: percent codes, doubled slashes, a slash at its end. Who lets a path through by one
spelling and passes another one on lets through what he did not mean. So one reading is made of all of them here.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mirrorsd.server.errors import ApiError

_BETWEEN = re.compile(r"[/\\]")
_SLASHES = re.compile("/{2,}")
_STEPS = (".", "..")


def read_path(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The request with one spelling of its path: decoded in `path`, and the same encoded again in `raw_path`.

    >>> read_path({"raw_path": b"//v1/a%2Fb/", "path": "//v1/a/b/"})
    {'raw_path': b'/v1/a/b', 'path': '/v1/a/b'}
    >>> read_path({"path": "/v1"})  # of a server that does not tell how it was spelled
    {'path': '/v1', 'raw_path': b'/v1'}

    Raises:
        ApiError: the path does not begin with a slash, or has steps that lead elsewhere.
    """
    given: str = scope["path"]
    is_path = (scope.get("raw_path") or given.encode()).startswith(b"/") and given.startswith("/")
    if not is_path or any(part in _STEPS for part in _BETWEEN.split(given)):
        message = "The path must begin with a slash, and none of its parts may be `.` or `..`."
        raise ApiError(400, message, code="invalid_path")
    path = _SLASHES.sub("/", given)
    path = path.rstrip("/") or "/"
    return {**scope, "path": path, "raw_path": quote(path).encode()}
