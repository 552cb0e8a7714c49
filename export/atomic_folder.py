"""A folder that appears complete or not at all.

Owns: building beside the final place, flushing to disk, renaming, and removing what was left half-done.
Does not own: what is written into it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError


@contextmanager
def atomic_folder(
    final: Path, *, overwrite: bool, goes_on: Callable[[Path], bool] = lambda left: False
) -> Iterator[Path]:
    """Give a folder to fill; rename it to `final` once the block ends without an error.

    It is empty, or what an earlier, killed export left there, if `goes_on` says that this one can go on from it.
    On any error or Ctrl-C the folder is removed.

    Raises:
        ExportError: `final` exists and may not be replaced, or its parent cannot be written.
    """
    _check_place(final, overwrite=overwrite)
    partial = final.with_name(f".{final.name}.partial")
    if not goes_on(partial):
        shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write into {final.parent}: {error}") from error
    try:
        yield partial
        _flush(partial)
        _put_in_place(partial, final)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ExportError(f"no space left beside {final}; nothing was written") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what would not fit on the disk of `folder`.

    Raises:
        ExportError: fewer than `num_bytes` are free there.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ExportError(
            f"not enough space in {folder.parent}: {num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free; "
            "nothing was written. Free some, or write the bundle elsewhere"
        )


def _check_place(final: Path, *, overwrite: bool) -> None:
    if not final.exists():
        return
    if not overwrite:
        raise ExportError(f"{final} exists already; choose another name, or replace it with `--overwrite`")
    if not (final / names.MANIFEST_FILE).is_file():
        raise ExportError(f"{final} exists and is not a bundle, so it is not overwritten; choose another name")


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename; an old bundle steps aside first and is removed last."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    flush_to_disk(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        flush_to_disk(path)
    flush_to_disk(folder)


def flush_to_disk(path: Path) -> None:
    """Force `path` to disk; Windows cannot flush folders and does not need to."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
