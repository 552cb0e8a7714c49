"""One training at a time in a folder.

Owns: the lock file; the system releases it when the process ends, however it ends.
Does not own: what is written there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mirrorsd.graphs.errors import ConfigError

__all__ = ["FolderLock"]

LOCK_FILE = "run.lock"


class FolderLock:
    """Holds a folder until `release`, or until the process is gone."""

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Raises:
            ConfigError: Another process is writing there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._handle: int | None = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            _lock(self._handle)
        except OSError as error:
            owner = os.pread(self._handle, 32, 0).decode("ascii", "replace") if hasattr(os, "pread") else ""
            self.release()
            raise ConfigError(
                f"{folder} is being written by another training (process {owner or 'unknown'}); wait for it, end it, "
                "or give this one a folder of its own"
            ) from error
        os.ftruncate(self._handle, 0)
        os.write(self._handle, str(os.getpid()).encode("ascii"))

    def release(self) -> None:
        """Let others write there; may be called again."""
        if self._handle is not None:
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
