"""One process at a time in a folder that is being written.

Owns: the lock file; the system releases it when the process ends, however it ends, so none is ever left behind locked.
Does not own: what is written there.
"""

import os
import sys
from pathlib import Path

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
        self._path = path
        self._owner = os.getpid()
        self._handle: int | None = None
        while self._handle is None:
            self._handle = self._taken(work)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, str(os.getpid()).encode("ascii"))

    def _taken(self, work: str) -> int | None:
        """Open and lock the file; None where its last owner removed it in between."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as error:
            owner = os.pread(handle, 32, 0).decode("ascii", "replace") if hasattr(os, "pread") else ""
            os.close(handle)
            raise ConfigError(
                f"{self._path.parent} is being written by another {work} (process {owner or 'unknown'}, which holds "
                f"{self._path.name}); wait for it, end it, or give this one a place of its own"
            ) from error
        if self._path.exists() and os.path.samestat(os.fstat(handle), self._path.stat()):
            return handle
        os.close(handle)
        return None

    def release(self) -> None:
        """Remove the file and let others write there; may be called again."""
        if self._handle is None:
            return
        # Windows keeps open files, and the next owner takes this one over; a forked child owns nothing.
        if sys.platform != "win32" and os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()


if sys.platform == "win32":

    def _lock(handle: int) -> None:
        import msvcrt

        os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the process number, so that it can be written
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:

    def _lock(handle: int) -> None:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
