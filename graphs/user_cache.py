"""What is kept on this machine about bundles: one folder per user, nothing beside or inside a bundle.

Owns: where it is, a folder per bundle in it, what it may take, listing and clearing. Does not own: what is kept
(`bundle_files` remembers passed checks, the runtime keeps compiled drafts and what was tuned or learned there).

A bundle's folder is named after the bundle and its manifest, so that it is found again wherever the bundle is moved.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import platformdirs

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import write_whole

VARIABLE = "MIRRORSD_CACHE"
MOST_BYTES = 2 << 30
"""What compiled drafts of all bundles may take: those of the bundles that were used longest ago make room."""
COMPILED = "compiled"
_FETCHED = "bundles"
_OWN_NAME = re.compile(r".+-[0-9a-f]{12}")
"""Of a folder about a bundle (`folder_of`). Where the user's variable names a place, other things may lie there."""
_CHECKED, _TUNED = "checked-*.json", "tuned-*.json"
_log = logging.getLogger("mirrorsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept about one bundle.

    Attributes:
        folder: where.
        bundles: paths at which the bundle was loaded, most recent first.
        num_bytes: all of it.
        last_used: seconds since 1970; 0 where nobody says.
        tuned: names of the cards that were tuned, or of which texts have taught the speeds.
    """

    folder: Path
    bundles: tuple[Path, ...]
    num_bytes: int
    last_used: float
    tuned: tuple[str, ...]

    @property
    def is_orphan(self) -> bool:
        """Whether the bundle is at none of these paths any more; of one that cannot be read nobody can say."""
        return bool(self.bundles) and not any(map(self._is_at, self.bundles))

    def _is_at(self, bundle: Path) -> bool:
        try:
            return folder_of(bundle) == self.folder
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it may only be closed to this user, or away for a moment
            return True


def cache_folder() -> Path:
    """The user's cache folder for mirrorsd, which need not exist; `MIRRORSD_CACHE` names another.

    Raises:
        ConfigError: the user has no home, and the variable names no folder.
    """
    try:
        if given := os.environ.get(VARIABLE):
            return Path(given).expanduser().absolute()  # no shell reads the files of services and containers
        found = platformdirs.user_cache_path("mirrorsd", appauthor=False)
    except RuntimeError as error:
        raise ConfigError(f"There is no folder for what is kept ({error}): set {VARIABLE} to one.") from error
    if not found.is_absolute():  # of a user without a home, by older versions: a folder called ~ where he is
        raise ConfigError(f"There is no folder for what is kept (the user has no home): set {VARIABLE} to one.")
    return found


def fetched_folder() -> Path:
    """Where bundles are kept that were fetched, one folder each; it need not exist."""
    return cache_folder() / _FETCHED


def folder_of(bundle: Path) -> Path:
    """Where things about this bundle are kept; the folder need not exist.

    Raises:
        OSError: the bundle's manifest cannot be read.
    """
    root = bundle.resolve()
    digest = hashlib.sha256((root / names.MANIFEST_FILE).read_bytes()).hexdigest()
    return cache_folder() / f"{root.name}-{digest[:12]}"


def check_writable(bundle: Path) -> None:
    """Refuse to begin what would be kept about this bundle in the end, where nothing can be.

    Raises:
        ConfigError: its folder cannot be made or written, or its disk is full.
        OSError: the bundle's manifest cannot be read.
    """
    folder = folder_of(bundle)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(io.DEFAULT_BUFFER_SIZE))  # a full disk takes the file, and nothing into it
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"What is kept about bundles cannot be written into {folder.parent} ({error.strerror}): {VARIABLE} names "
            "another folder."
        ) from error


def remember_check(bundle: Path, seal: dict[str, object]) -> None:
    """Keep that a bundle at this path was found whole, and forget the one that was there before.

    A place that cannot be written only costs time, at each load; that is said once.
    """
    with suppress(OSError):  # another process may be at the same
        path = _check_path(bundle)
        for former in cache_folder().glob(f"*/{path.name}"):
            if former.parent != path.parent:
                former.unlink()
                _forget_unless_elsewhere(former.parent)
    try:
        path = _check_path(bundle)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"bundle": str(bundle.resolve()), **seal}).encode())
    except OSError as error:
        _say_once(f"{cache_folder()}", error.strerror)


@cache
def _say_once(folder: str, reason: str | None) -> None:
    _log.warning(
        "nothing can be kept in %s (%s), so each load checks files and compiles drafts anew; %s names another folder",
        *(folder, reason, VARIABLE),
    )


def passed_check(bundle: Path, seal: dict[str, object]) -> bool:
    """Whether `remember_check` was told the same of this path; counts as a use of what is kept."""
    try:
        path = _check_path(bundle)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if found != {"bundle": str(bundle.resolve()), **seal}:
        return False
    with suppress(OSError):
        os.utime(path)
    return True


def list_kept() -> list[Kept]:
    """What is kept, the bundle that was used last first."""
    found = []
    with suppress(OSError):
        for folder in cache_folder().iterdir():
            with suppress(OSError):  # another process may be clearing it
                found += [_describe(folder)] if folder.is_dir() and _OWN_NAME.fullmatch(folder.name) else []
    return sorted(found, key=lambda kept: -kept.last_used)


def clear(kept: Kept, *, with_tuned: bool) -> int:
    """Delete what is kept about one bundle; tuned settings, which took a measurement, only if asked for.

    While these stay, it stays known whose they are; the bundle's files are checked anew all the same.

    Returns:
        The bytes that this gave back. What another process holds stays (Windows).
    """
    keeps_tuned = not with_tuned and bool(kept.tuned)
    for path in sorted(kept.folder.rglob("*"), reverse=True):
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif keeps_tuned and path.match(_CHECKED):
                _forget_seal(path)
            elif not (keeps_tuned and path.match(_TUNED)):
                path.unlink()
    with suppress(OSError):
        kept.folder.rmdir()
    return kept.num_bytes - _size(kept.folder)


def _forget_seal(check: Path) -> None:
    """Leave of a passed check only where the bundle is, and when it was used."""
    when = check.stat().st_mtime
    with suppress(ValueError, LookupError, TypeError):
        bundle = json.loads(check.read_text(encoding="utf-8"))["bundle"]
        write_whole(check, json.dumps({"bundle": bundle}).encode())
        os.utime(check, (when, when))


def make_room(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Keep compiled drafts within `most_bytes`: those of other bundles than that of `folder` go, oldest use first."""
    kept = list_kept()
    total = sum(_size(one.folder / COMPILED) for one in kept)
    for one in reversed(kept):
        if total <= most_bytes:
            return
        if one.folder != folder:
            total -= _size(one.folder / COMPILED)
            shutil.rmtree(one.folder / COMPILED, ignore_errors=True)


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Within it this process has an empty cache of its own, which is deleted at the end."""
    before = os.environ.get(VARIABLE)
    with TemporaryDirectory(prefix="mirrorsd-", ignore_cleanup_errors=True) as folder:
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def _check_path(bundle: Path) -> Path:
    place = hashlib.sha256(os.fsencode(bundle.resolve())).hexdigest()
    return folder_of(bundle) / f"checked-{place[:12]}.json"


def _forget_unless_elsewhere(folder: Path) -> None:
    kept = _describe(folder)
    if not kept.bundles:
        clear(kept, with_tuned=True)


def _describe(folder: Path) -> Kept:
    checks = [(path.stat().st_mtime, path) for path in folder.glob(_CHECKED)]
    bundles = []
    for _, path in sorted(checks, reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError):
            bundles.append(Path(json.loads(path.read_text(encoding="utf-8"))["bundle"]))
    tuned = (path.stem.partition("-")[2] for path in folder.glob(_TUNED))
    return Kept(
        folder=folder,
        bundles=tuple(bundles),
        num_bytes=_size(folder),
        last_used=max((when for when, _ in checks), default=0.0),
        tuned=tuple(sorted(tuned)),
    )


def _size(folder: Path) -> int:
    """Bytes of all files; those that another process deletes meanwhile, or another user's, count nothing."""
    total = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
    return total
