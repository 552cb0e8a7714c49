"""Files that are there whole or not at all: written beside, then renamed.

Owns: the name of the unfinished file, and that none is left. Does not own: what is written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
