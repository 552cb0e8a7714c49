"""Files that are there whole or not at all: written beside, then renamed; and what kind a file is.

Owns: the name of the unfinished file, and that none is left. Does not own: what is written.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from mirrorsd.graphs import names

_GGUF = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file by its first bytes; one of that name that is none is taken for a damaged one."""
    if not path.is_file():
        return path.suffix == names.GGUF_SUFFIX and not path.is_dir()
    with path.open("rb") as stream:
        return stream.read(len(_GGUF)) == _GGUF or path.suffix == names.GGUF_SUFFIX


@contextmanager
def whole_file(path: Path, *, survives_power_cuts: bool = False) -> Iterator[IO[bytes]]:
    """A stream to write `path` by; the file has that name only once the block ends without an error.

    Args:
        path: the file's name in the end; what had it before is replaced, a link's file in its place. A device or a pipe
            is written as it is.
        survives_power_cuts: force the bytes to the disk before they get their name, which may take a moment.

    Raises:
        OSError: the folder cannot be written, or a folder has that name.
    """
    if path.exists() and not path.is_file():  # a device or a pipe is written as it is, a folder is no file
        with path.open("wb") as stream:
            yield stream
        return
    whole, partial = _places(path)
    opened = _opened(partial, path)
    try:
        with opened as stream:
            yield stream
            if survives_power_cuts:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(whole)
    finally:
        partial.unlink(missing_ok=True)


def try_place(path: Path) -> None:
    """Try whether a `whole_file` of this name can be begun, before there is anything to write; nothing is left.

    Raises:
        OSError: it cannot.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    _, partial = _places(path)
    _opened(partial, path).close()
    partial.unlink(missing_ok=True)


def _places(path: Path) -> tuple[Path, Path]:
    """What is written in the end, and the unfinished file beside it."""
    whole = path.resolve()  # a link stays one
    return whole, whole.with_name(f"{whole.name}.{uuid4().hex[:12]}")  # two may write one name at once


def _opened(partial: Path, path: Path) -> IO[bytes]:
    try:
        return partial.open("wb")
    except OSError as error:
        error.filename = str(path)  # nobody has typed the other name
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` as a `whole_file`."""
    with whole_file(path) as stream:
        stream.write(content)
