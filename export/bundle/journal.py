"""What an export has finished, kept in its work folder so that a killed or refused one can go on.

Owns: the journal's file, its digest of inputs and options, and what counts as finished. Does not own: the work folder
(`atomic_folder.py`), or what the finished parts are (`target_graphs.py`, `pair.py`).
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mirrorsd.graphs.errors import ParityError

JOURNAL_FILE = ".export-journal"
_CHOICES = "choices"
"""Is no part: nothing has to be kept for it."""


class Journal:
    """Lines of JSON: the first is the digest of what the export was asked for, each other one a finished part.

    A part is recorded after its files are on disk; one that is recorded as None is forgotten. A line that a kill cut
    short is no line.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        """Open the journal in `folder`, or begin one; `atomic_folder` has seen to it that the digests agree."""
        self._path = folder / JOURNAL_FILE
        self._parts: dict[str, Any] = {}
        lines = _whole_lines(self._path)
        for line in lines[1:]:
            self._parts.update(json.loads(line))
        kept = lines or [json.dumps(digest)]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    @property
    def finished(self) -> tuple[str, ...]:
        """Names of the finished parts, in the order in which they were finished."""
        return tuple(part for part, content in self._parts.items() if content is not None and part != _CHOICES)

    def get(self, part: str) -> Any:
        """What was recorded of `part`; None where it is not finished."""
        return self._parts.get(part)

    def chosen(self, what: str, choose: Callable[[], bool]) -> bool:
        """What was chosen of two ways, by an earlier run or now: a clock may say otherwise each time."""
        choices = self._parts.get(_CHOICES, {})
        if what not in choices:
            self.record(_CHOICES, choices | {what: choose()})
        return bool(self._parts[_CHOICES][what])

    def record(self, part: str, content: Any) -> None:
        """Note that `part` is finished and its files are on disk; `content` is JSON. None forgets the part."""
        self._parts[part] = content
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({part: content}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    @contextmanager
    def forgetting(self, *parts: str) -> Iterator[None]:
        """Forget `parts` where the block finds that they are wrong, so that the next run makes them anew."""
        try:
            yield
        except ParityError:
            for part in parts:
                self.record(part, None)
            raise


def is_of(folder: Path, digest: str) -> bool:
    """Whether `folder` holds finished parts of an export with this digest."""
    lines = _whole_lines(folder / JOURNAL_FILE)
    return bool(lines) and lines[0] == json.dumps(digest) and bool(Journal(folder, digest).finished)


def digest_of(folders: Iterable[Path], asked: Any) -> str:
    """Hash what an export depends on: the files in `folders` by name, size and time of change, and `asked` (JSON).

    Hidden files are none of a checkpoint's, and neither are folders: an export's own may lie there.
    """
    files = [
        (path.name, found.st_size, found.st_mtime_ns)
        for folder in folders
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and (found := _stat(path)) is not None
    ]
    return hashlib.sha256(json.dumps([files, asked], sort_keys=True).encode()).hexdigest()


def _stat(path: Path) -> os.stat_result | None:
    """Of a regular file or a link to one; None of anything else, such as a link to nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line[:-1] for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
