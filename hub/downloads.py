"""One file over HTTP that goes on where it stopped: within a run, and in the next one.

Owns: what is already there, a few further tries, a bound on every wait. Does not own: where files lie, whether their
content is right (its reader has the hashes), words for what a hub refuses (`asking`).
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirrorsd.hub.asking import web

_TRIES = 4
"""In a row that bring nothing new."""
_PAUSE_S = 1.0
_NOTHING_MORE = 416
_PART = 206

OnBytes = Callable[[int], None]
"""Told how many bytes of the file are there."""


class TransferError(OSError):
    """A server ended a file before its end each time, or gave more than it has."""


class LedAstrayError(OSError):
    """A link that began encrypted led to an address that is not."""


def download(
    link: str,
    path: Path,
    *,
    headers: Mapping[str, str] | None = None,
    num_bytes: int | None,
    on_bytes: OnBytes,
    has_hash: bool = False,
) -> None:
    """Write what `link` gives to `path`, behind the bytes that an earlier try has left there.

    Args:
        link: The address; it always gives the same content, or none that fits (`headers` may say so by `If-Range`).
        path: The file; it stays, unfinished, where the server breaks off.
        headers: Sent along.
        num_bytes: The file's size; None where only the server knows.
        on_bytes: Told how far it is.
        has_hash: Whether its reader knows the content's hash; otherwise an encrypted link must stay encrypted.

    Raises:
        HTTPError: The server refuses (`HfHubHTTPError`), or does not answer in time, of httpx.
        TransferError: It ends too early every time, or sends too much.
        LedAstrayError: Somebody could change it on its way here, although `link` is encrypted.
        OSError: The file cannot be written.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    path.touch()
    most = had = _bytes_of(path)
    tries = _TRIES
    while had != num_bytes:
        failure: Exception = TransferError(f"{link} ends before its {num_bytes} bytes")
        try:
            _go_on(link, path, dict(headers or {}), num_bytes, on_bytes, has_hash=has_hash)
            if num_bytes is None and path.exists():
                return
        except HfHubHTTPError:
            raise
        except HTTPError as error:
            failure = error
        had = _bytes_of(path)
        tries = _TRIES if had > most else tries - 1
        most = max(most, had)
        if had != num_bytes:
            if not tries:
                raise failure
            time.sleep(_PAUSE_S)


def _go_on(
    link: str, path: Path, headers: dict[str, str], num_bytes: int | None, on_bytes: OnBytes, *, has_hash: bool
) -> None:
    """Append the rest of the file; begin anew where the server cannot give a part, or what is there is too long."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    had = _bytes_of(path)
    if num_bytes is not None and had > num_bytes:
        had = 0
    headers["Accept-Encoding"] = "identity"  # a compressed answer has no bytes to go on from
    if had:
        headers["Range"] = f"bytes={had}-"
    with web().get_session().stream("GET", link, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
        if had and response.status_code == _NOTHING_MORE:  # what is there is of another file, or all of it
            path.unlink()
            return
        web().hf_raise_for_status(response)
        if not has_hash:
            _check_way(response)
        is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {had}-")
        done = had if had and response.status_code == _PART and is_rest else 0
        with path.open("ab" if done else "wb") as stream:
            for chunk in response.iter_raw():
                stream.write(chunk)
                done += len(chunk)
                on_bytes(done)
                if num_bytes is not None and done > num_bytes:
                    raise TransferError(f"{link} gives more than the {num_bytes} bytes that were expected")


def _check_way(response: Any) -> None:
    """Refuse an answer that was encrypted at first, and not on every step of its way.

    Raises:
        LedAstrayError: the message has the address that is open.
    """
    steps = [step.request.url for step in (*response.history, response)]
    is_open = [step for step in steps if step.scheme != "https"]
    if steps[0].scheme == "https" and is_open:
        raise LedAstrayError(f"it leads to {is_open[0]}, which can be changed on its way here")


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
