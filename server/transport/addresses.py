"""Servers behind a front: what is an address of one, and what address a request has there."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx2

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server.errors import ApiError


def servers_of(given: Sequence[str]) -> list[httpx2.URL]:
    """Addresses, read once: what a client sends is never read as a part of one.

    Raises:
        ConfigError: none, or one that is no address of a server.
    """
    if not given:
        raise ConfigError("No server was given: name at least one, like http://127.0.0.1:8601.")
    return [_server_of(text) for text in given]


def _server_of(text: str) -> httpx2.URL:
    with suppress(httpx2.InvalidURL):
        url = httpx2.URL(text)
        is_whole = url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port < 1 << 16)
        if is_whole and not url.userinfo and not {*" ?#"} & {*text}:
            return url
    raise ConfigError(f"{text!r} is no address of a server; allowed: http://HOST:PORT, with a path or without.")


def address_at(server: httpx2.URL, scope: Mapping[str, Any]) -> httpx2.URL:
    """The address at a server of what a request asks for: only its path and query, behind the server's own path.

    Raises:
        ApiError: they are no part of an address.
    """
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    try:
        return server.copy_with(raw_path=server.raw_path.rstrip(b"/") + scope["raw_path"] + query)
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise ApiError(400, f"The path or the query is no part of an address: {error}", code="invalid_path") from None
