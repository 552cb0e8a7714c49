"""Bundle references: the one place that makes a folder of what names a bundle, wherever that lies.

A reference is a folder, an archive of one (zip or tar), `https://...` of an archive, or `hf:ORG/NAME[@REVISION]` on the
Hugging Face hub. What is fetched stays in the user's cache: the next use of the same reference needs no network, and a
bundle does not change until it is asked for by another revision.

Owns: what a reference may be, where its bundle is kept, that it is there whole or not at all. Does not own: the
transfer (`downloads`), what an archive holds (`archives`), the check at each loading (`graphs.bundle_files`).
"""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.graphs.folder_lock import FolderLock
from mirrorsd.graphs.user_cache import VARIABLE, fetched_folder
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.hub.archives import ending_of, is_archive, opened
from mirrorsd.hub.asking import REPOSITORY
from mirrorsd.hub.links import Link, fetch_archive, take_out
from mirrorsd.hub.repositories import fetch_files, find_revision

OnProgress = Callable[[str, float], None]
_HUB = re.compile(rf"hf:(?P<repository>{REPOSITORY})(?:@(?P<revision>[\w./-]+))?")
_LINK = re.compile(r"(?P<scheme>https?):/{1,2}(?P<rest>.*)", re.DOTALL)
"""Of a `Path`, too, which makes one slash of two."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ORIGIN_FILE, _PARTIAL = "origin.json", ".partial"
_SUFFIX = ".mirror"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A bundle that was fetched.

    Attributes:
        reference: what names just this one, its revision included.
        folder: the bundle.
        num_bytes: its files.
        when: it was fetched, in seconds since 1970.
    """

    reference: str
    folder: Path
    num_bytes: int
    when: float


def bundle_folder(reference: str | Path, on_progress: OnProgress | None = None) -> Path:
    """The folder of the bundle that a reference names; what is not on this machine is fetched.

    Args:
        reference: a folder, an archive, `https://...` of an archive (`#sha256=DIGITS` pins its content), or
            `hf:ORG/NAME[@REVISION]`. Without a revision it is the one that was fetched first, or the newest.
        on_progress: told what is being fetched, and what share of it is there.

    Returns:
        A path that was given as it is, unless it is an archive: whether it is a bundle is for its reader to say.

    Raises:
        ConfigError: a reference that cannot be one, or another process is fetching the same.
        BundleError: there is no such bundle, it is damaged or not reachable, or there is no room for it.
    """
    text, show = str(reference), on_progress or (lambda stage, share: None)
    if text.startswith("hf:"):
        return _from_hub(text, show)
    if found := _LINK.fullmatch(text):
        return _from_link(f"{found['scheme']}://{found['rest']}", show)
    if not text:
        raise ConfigError("No bundle is named: expected a folder, an archive, an address of one, or hf:ORG/NAME.")
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError as error:  # as a name that is too long
        raise BundleError(f"{path} cannot be looked at: {error.strerror}") from error
    if not is_file:
        return path
    if is_archive(path):
        return _from_archive(path, show)
    if ending_of(path.name):
        raise BundleError(f"{path} is no whole archive, neither a zip nor a tar: fetch it, or copy it, once more")
    return path


def is_fetched_by(text: str) -> bool:
    """Whether a reference names something that is not a path on this machine."""
    return text.startswith("hf:") or _LINK.fullmatch(text) is not None


def fetched_bundles() -> list[Fetched]:
    """All bundles that were fetched, the newest first."""
    found = []
    for origin in fetched_folder().glob(f"*/{_ORIGIN_FILE}"):
        folder = _whole(origin.parent)
        with suppress(OSError, ValueError, LookupError, TypeError):
            said = json.loads(origin.read_text(encoding="utf-8"))
            if folder is not None:
                reference, when = str(said["reference"]), float(said["when"])
                found.append(Fetched(reference=reference, folder=folder, num_bytes=_size(folder), when=when))
    return sorted(found, key=lambda one: -one.when)


def fetched_as(reference: str) -> list[Fetched]:
    """What was fetched by a reference; of a repository without a revision, all revisions of it that are here."""
    return [one for one in fetched_bundles() if reference in (one.reference, one.reference.rpartition("@")[0])]


def unfinished() -> list[Path]:
    """What fetches left that did not come to their end."""
    return [place / _PARTIAL for place in fetched_folder().glob("*") if place.is_dir() and _whole(place) is None]


def forget(folder: Path) -> int:
    """Delete a bundle that was fetched, or what an unfinished fetch left, and return the bytes that this gave back.

    Raises:
        ConfigError: it is being fetched.
    """
    place = folder.parent
    lock = FolderLock(place / ".lock", "fetch")
    try:
        num_bytes = _size(place)
        with suppress(OSError):  # of a file that another process holds (Windows)
            folder = folder.rename(place / _PARTIAL)
        (place / _ORIGIN_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
    shutil.rmtree(place, ignore_errors=True)
    return num_bytes - _size(place)


def _from_hub(text: str, show: OnProgress) -> Path:
    found = _HUB.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} names no repository; expected hf:ORG/NAME or hf:ORG/NAME@REVISION.")
    repository, revision = found["repository"], found["revision"]
    if kept := _kept_of(repository, revision):
        return kept
    with _reachable(text):
        at = find_revision(repository, revision)
    reference = f"hf:{repository}@{at.commit}"

    def fill(place: Path, folder: Path) -> str:
        fetch_files(at, folder, show)
        return repository.partition("/")[2]

    return _kept(f"{repository.replace('/', '--')}--{at.commit[:12]}", reference, fill)


def _kept_of(repository: str, revision: str | None) -> Path | None:
    """What was fetched of a repository: at this commit, or, where no revision is named, most recently."""
    if revision is not None and not _COMMIT.fullmatch(revision):
        return None
    of_it = [one for one in fetched_bundles() if one.reference.partition("@")[0] == f"hf:{repository}"]
    chosen = [one.folder for one in of_it if revision is None or one.reference.endswith(f"@{revision}")]
    return chosen[0] if chosen else None


def _from_link(text: str, show: OnProgress) -> Path:
    link = Link.parse(text)
    key = hashlib.sha256(f"{link.address}#{link.sha256}".encode()).hexdigest()
    host = re.sub(r"[^\w.-]", "-", link.host)
    return _kept(f"{host}--{key[:12]}", text, lambda place, folder: fetch_archive(link, place, folder, show))


def _from_archive(path: Path, show: OnProgress) -> Path:
    with opened(path, path.name) as archived:
        key = hashlib.sha256(archived.text).hexdigest()
    reference = str(path.resolve())
    return _kept(f"archive--{key[:12]}", reference, lambda _, folder: take_out(path, path.name, folder, show))


def _kept(key: str, reference: str, fill: Callable[[Path, Path], str]) -> Path:
    """The bundle that is kept under a key; `fill` writes it into a folder, and gives its name, where it is not there.

    The folder gets its name last: a bundle is whole or not there. What an attempt leaves is gone on from.
    """
    place = fetched_folder() / key
    if found := _whole(place):
        return found
    with _reachable(reference):
        lock = FolderLock(place / ".lock", f"fetch of {reference}")
        try:
            if found := _whole(place):  # of another process, meanwhile
                return found
            partial = place / _PARTIAL
            partial.mkdir(exist_ok=True)
            final = place / f"{fill(place, partial).removesuffix(_SUFFIX) or 'bundle'}{_SUFFIX}"
            write_whole(place / _ORIGIN_FILE, json.dumps({"reference": reference, "when": time()}).encode())
            partial.rename(final)  # last: without its origin nobody would find it, or delete it
        finally:
            lock.release()
    return final


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _whole(place: Path) -> Path | None:
    return next((folder for folder in place.glob(f"*{_SUFFIX}") if (folder / names.MANIFEST_FILE).is_file()), None)


@contextmanager
def _reachable(reference: str) -> Iterator[None]:
    """Within it, a server that does not answer and a disk that does not take more become a `BundleError`."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise BundleError(
                f"no space is left in {fetched_folder()} for {reference}; what was fetched is kept. Make room and try "
                f"again, or name another place by {VARIABLE}"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EDQUOT):
            raise BundleError(
                f"{reference} cannot be kept in {fetched_folder()}: {error}. Name another place by {VARIABLE}"
            ) from error
        raise _not_answered(reference, error) from error
    except HTTPError as error:
        raise _not_answered(reference, error) from error


def _not_answered(reference: str, error: Exception) -> BundleError:
    reason = str(error) or type(error).__name__
    return BundleError(
        f"{reference} is not on this machine, and whoever has it does not answer ({reason}). Connect, then try again: "
        "what was fetched so far is kept"
    )
