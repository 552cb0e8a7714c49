"""Files that are there whole or not at all: written beside, then renamed; and what kind a file is.

Owns: the name of the unfinished file, and that none is left. Does not own: what is written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
        path: the file's name in the end; what had it before is replaced.
        survives_power_cuts: force the bytes to the disk before they get their name, which may take a moment.

    Raises:
        OSError: the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            yield stream
            if survives_power_cuts:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` as a `whole_file`."""
    with whole_file(path) as stream:
        stream.write(content)
