"""A folder that appears complete or not at all.

Owns: building beside the final place, one process at a time, flushing to disk, renaming, and what is left half-done.
Does not own: what is written into it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.folder_lock import FolderLock


@contextmanager
def atomic_folder(
    final: Path,
    *,
    overwrite: bool,
    goes_on: Callable[[Path], bool] = lambda left: False,
    work_files: Collection[str] = (),
) -> Iterator[Path]:
    """Give a folder to fill; rename it to `final` once the block ends without an error.

    It is empty, or what an earlier export left there, if `goes_on` says that this one can go on from it. A refusal
    (`ExportError`, `ConfigError`) leaves such a folder for the next run; any other error, and Ctrl-C, removes it.

    Args:
        final: The folder's name in the end.
        overwrite: Whether a bundle of that name may be replaced.
        goes_on: Whether a folder holds finished work of the same export.
        work_files: Paths in the folder that are there only until it is complete.

    Raises:
        ExportError: `final` exists and may not be replaced, or its parent cannot be written.
        ConfigError: Another process is writing `final`.
    """
    final = _named(final)
    partial = final.with_name(f".{final.name}.partial")
    try:
        lock = FolderLock(final.with_name(f".{final.name}.lock"), f"export to {final.name}")
    except OSError as error:
        reason = error.strerror or error
        raise _not_writable(final.parent, reason) from error
    try:
        _undo_half_a_swap(final)
        _refuse_taken(final, overwrite=overwrite)
        if not goes_on(partial):
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        yield partial
        _refuse_taken(final, overwrite=overwrite)  # again: an hour may have passed
        _flush(partial)
        _put_aside(final)
        for file in work_files:
            (partial / file).unlink(missing_ok=True)
        flush_to_disk(partial)
        _put_in_place(partial, final)
    except BaseException as error:
        _undo_half_a_swap(final)
        is_kept = isinstance(error, ExportError | ConfigError) and goes_on(partial)
        if not is_kept:
            shutil.rmtree(partial, ignore_errors=True)
        if is_kept and isinstance(error, _NoSpaceError):
            raise ExportError(
                f"{error}. {partial} holds {_size(partial) / 1e6:,.1f} MB of what is finished: the same command goes "
                "on from there; delete it if the bundle is to be written elsewhere"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportError(f"no space left beside {final}; nothing was written. Free some and try again") from error
        raise
    finally:
        lock.release()


class _NoSpaceError(ExportError):
    """The disk is too small for what is left to do."""


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what would not fit on the disk of `folder`.

    Raises:
        ExportError: fewer than `num_bytes` are free there.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise _NoSpaceError(
            f"not enough space in {folder.parent}: {num_bytes / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are "
            "free. Free some, or write the bundle elsewhere"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_place(final: Path, *, overwrite: bool) -> None:
    """Refuse a place that no folder can be written to, before any work; nothing is made there.

    Raises:
        ExportError: `final` exists and may not be replaced, or what is above it takes no new folder.
    """
    final = _named(final)
    _refuse_taken(final, overwrite=overwrite)
    above = next(place for place in final.absolute().parents if place.exists())
    if not above.is_dir():
        raise _not_writable(final.parent, f"{above} is a file")
    if not os.access(above, os.W_OK):
        raise _not_writable(above, os.strerror(errno.EACCES))


def _named(final: Path) -> Path:
    """The place under its own name; a link stays one."""
    found = final.resolve() if final.is_symlink() or final.name in ("", "..") else final
    if not found.name:
        raise ExportError(f"{found} cannot be a bundle: give the name of a folder in it")
    return found


def _not_writable(folder: Path, reason: object) -> ExportError:
    return ExportError(f"cannot write into {folder} ({reason}): choose another folder as --output")


def _refuse_taken(final: Path, *, overwrite: bool) -> None:
    if not final.exists():
        return
    if not (final / names.MANIFEST_FILE).is_file():
        raise ExportError(f"{final} exists and is not a bundle, so it is never overwritten; choose another name")
    if not overwrite:
        raise ExportError(f"{final} exists already; choose another name, or replace it with `--overwrite`")


def _old(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _undo_half_a_swap(final: Path) -> None:
    """Give a bundle its name back that stood aside for a new one which never came."""
    if _old(final).exists() and not final.exists():
        _old(final).rename(final)


def _put_aside(final: Path) -> None:
    """Have an old bundle make way: if that cannot be done, no work is lost yet."""
    shutil.rmtree(_old(final), ignore_errors=True)
    try:
        if final.exists():
            final.rename(_old(final))
    except OSError as error:
        raise ExportError(f"cannot replace {final} ({error}); close what uses it there") from error


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename; the old bundle is removed last, or comes back if the new one cannot be renamed."""
    try:
        partial.rename(final)
    except OSError as error:
        raise ExportError(f"cannot name the finished folder {final} ({error}); close what uses it there") from error
    flush_to_disk(final.parent)
    shutil.rmtree(_old(final), ignore_errors=True)


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
