"""A conversation's cache as a file: the target's rows with the tokens that they belong to.

A file is checked by its own SHA-256, and taken only where it was made: by the same bundle, on the same kind of device,
with the same versions of the runtimes. Elsewhere rows could have other last bits, and a text could differ from one that
was read anew. The draft's cache is not in it: the draft reads a text again in a moment.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.inventory import runtime_versions
from mirrorsd.devices.layouts import processor_name
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.whole_file import whole_file

_MAGIC = b"mirrorsd-cache-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH = Struct("<Q")


class SavedCache(NamedTuple):
    """Token ids `[n]` and what the target keeps of them: rows by layer, and states of recurrent layers."""

    token_ids: list[int]
    rows: Sequence[NDArray[Any]]
    states: Sequence[NDArray[Any]] = ()


def origin_of(manifest: Manifest, target: str) -> dict[str, str]:
    """What must be equal where a cache is made and where it is used; `target` is what runs on which device."""
    found = {"bundle": hashlib.sha256(manifest.to_json().encode()).hexdigest(), "target": target}
    found["processor"] = processor_name()  # kernels are chosen by its instructions
    return found | {name: version for name, version in runtime_versions().items() if name != "mirrorsd"}


def write_cache(path: Path, cache: SavedCache, origin: dict[str, str]) -> None:
    """Write the file whole or not at all.

    Raises:
        OSError: there is no room, or no right to write.
    """
    header = json.dumps({"origin": origin, "token_ids": cache.token_ids}).encode()
    arrays = (*cache.rows, *cache.states)
    parts = [_LENGTH.pack(len(header)), header, *(each.tobytes() for each in arrays)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    with whole_file(path) as stream:
        stream.writelines([_MAGIC, digest.digest(), *parts])


def read_cache(path: Path, origin: dict[str, str], like: SavedCache) -> SavedCache:
    """Read what `write_cache` wrote; `like` holds arrays of the same kinds, with any number of rows.

    Raises:
        BundleError: no such file, another kind of file, damaged, made elsewhere, or of other sizes.
    """
    try:
        if path.exists() and not path.is_file():  # a device may have no end
            raise BundleError(f"{path} is no saved cache: it is no file.")
        content = memoryview(path.read_bytes())
    except (OSError, ValueError) as error:  # a path with a null byte
        raise BundleError(f"{path} cannot be read ({getattr(error, 'strerror', error)}).") from error
    body = content[len(_MAGIC) + _DIGEST_BYTES :]
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise BundleError(f"{path} is no saved cache: those are made by MirrorSession.save_cache.")
    if hashlib.sha256(body).digest() != bytes(content[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]):
        raise BundleError(f"{path} is damaged: its checksum does not fit. Save the conversation again.")
    stop = _LENGTH.size + int.from_bytes(body[: _LENGTH.size], "little")
    token_ids, made_by = _header(path, bytes(body[_LENGTH.size : stop]))
    for name in sorted({*origin, *made_by}):
        made, here = made_by.get(name, "none"), origin.get(name, "none")
        if made != here:
            raise BundleError(
                f"{path} was made with another {name} ({_shown(made)}; here it is {_shown(here)}). Send the text "
                "again instead: it is read anew."
            )
    shapes = [(*one.shape[:2], len(token_ids), *one.shape[3:]) for one in like.rows]
    shapes += [one.shape for one in like.states]
    found = _arrays(path, body[stop:], shapes, [one.dtype for one in (*like.rows, *like.states)])
    return SavedCache(token_ids, found[: len(like.rows)], found[len(like.rows) :])


def _header(path: Path, text: bytes) -> tuple[list[int], dict[str, str]]:
    try:
        document = json.loads(text)
        token_ids = [*document["token_ids"]]
        if any(type(token) is not int for token in token_ids):  # a boolean is no token
            raise ValueError("token_ids")
        return token_ids, {str(name): str(value) for name, value in document["origin"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} has a header that no saved cache has ({error!r}).") from error


def _arrays(
    path: Path, content: memoryview, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]
) -> list[NDArray[Any]]:
    found, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        stop = start + int(np.prod(shape)) * dtype.itemsize
        if stop <= len(content):
            found.append(np.frombuffer(content[start:stop], dtype=dtype).reshape(shape))
        start = stop
    if start != len(content):
        raise BundleError(f"{path} holds {len(content)} bytes of rows, expected {start}. Save the conversation again.")
    return found


def _shown(value: str) -> str:
    return value if len(value) != 2 * _DIGEST_BYTES else f"{value[:12]}..."
