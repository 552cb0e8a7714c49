"""One process at a time in a folder that is being written.

Owns: the refusal, and that no lock file is left; the system releases it when the process ends, however it ends.
Does not own: the lock itself (`filelock`), what is written there.
"""

import os
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from mirrorsd.graphs.errors import ConfigError

__all__ = ["FolderLock"]


class FolderLock:
    """Holds a lock file until `release`, or until the process is gone."""

    def __init__(self, path: Path, work: str) -> None:
        """Take the lock file `path`; its folder is made.

        Args:
            path: The file, in the folder or beside it. It holds the number of the process that has it.
            work: What is done there, for the refusal: "training", "export".

        Raises:
            ConfigError: Another process has it.
            OSError: The file cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._owner = path, os.getpid()
        self._lock = FileLock(path, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"{path.parent} is being written by another {work} (process {_owner_in(path)}, which holds "
                f"{path.name}); wait for it, end it, or give this one a place of its own"
            ) from error
        if sys.platform != "win32":  # where nobody else may read or write a locked file
            path.write_text(str(self._owner), encoding="ascii")

    def release(self) -> None:
        """Remove the file and let others write there; may be called again."""
        if not self._lock.is_locked or os.getpid() != self._owner:  # a forked child owns nothing
            return
        if sys.platform != "win32":  # which keeps open files; the next owner takes this one over
            self._path.unlink(missing_ok=True)
        self._lock.release()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.release()


def _owner_in(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip() or "unknown"
    except (OSError, UnicodeDecodeError):
        return "unknown"
