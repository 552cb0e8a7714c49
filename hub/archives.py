"""A bundle as one file: written as a zip that two runs make alike, read from zips and tars.

Owns: what is taken out of an archive: the files that its manifest lists, whole and with their hashes, and nothing else.
Does not own: where it comes from, where its bundle goes.
"""

import hashlib
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.manifest_values import read_manifest

Open = Callable[[], IO[bytes]]
OnBytes = Callable[[int], None]
_CHUNK = 1 << 20
_MOST_OF_MANIFEST = 64 << 20
_WHEN = (1980, 1, 1, 0, 0, 0)
"""The first day that a zip knows: no archive differs by when it was made."""
SUFFIX = ".zip"
_UNPACKED = {ending for _, endings, _ in shutil.get_unpack_formats() for ending in endings}
_ENDINGS = tuple(sorted(_UNPACKED | {".7z", ".bz2", ".gz", ".rar", ".xz", ".zst"}, key=len, reverse=True))
"""Of archives that Python unpacks, and of others; the longest first."""
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError)
"""`RuntimeError` is how `zipfile` refuses one that is encrypted, or packed in a way that it does not know."""


class Archived:
    """A bundle inside an open archive.

    Attributes:
        name: of its folder there; that of the archive's file where it lies at the top.
        manifest: what it says about itself.
        text: the same, as it is in the archive.
    """

    def __init__(self, called: str, members: Mapping[str, Open]) -> None:
        """Find the bundle in an archive that its user knows as `called`.

        Raises:
            BundleError: there is none, or its manifest cannot be read.
        """
        self._called, self._members = called, members
        found = sorted((name for name in members if PurePosixPath(name).name == names.MANIFEST_FILE), key=len)
        if not found:
            raise BundleError(f"{called} has no {names.MANIFEST_FILE}, so there is no bundle in it")
        folder = PurePosixPath(found[0]).parent
        self._prefix = "" if folder == PurePosixPath() else f"{folder.as_posix()}/"
        self.name = folder.name or called.partition(".")[0]
        with self._open(names.MANIFEST_FILE) as stream:
            self.text = _read(stream, _MOST_OF_MANIFEST, called)
        try:
            document = self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{names.MANIFEST_FILE} in {called} is not text") from error
        self.manifest: Manifest = read_manifest(document, origin=f"{names.MANIFEST_FILE} in {called}")

    def unpack(self, folder: Path, on_bytes: OnBytes) -> None:
        """Write all of the bundle's files to `folder`, over what is there; other files there stay.

        Raises:
            BundleError: one is missing, too long, or has another SHA-256.
            OSError: the folder cannot be written.
        """
        done = 0
        order = {name: place for place, name in enumerate(self._members)}
        for name in sorted(self.manifest.files, key=lambda name: order.get(self._prefix + name, 0)):
            entry = self.manifest.files[name]
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            digest, size = hashlib.sha256(), 0
            with self._open(name) as stream, target.open("wb") as written:
                while chunk := _read(stream, _CHUNK, self._called):
                    size += len(chunk)
                    if size > entry.bytes:
                        break
                    digest.update(chunk)
                    written.write(chunk)
                    on_bytes(done + size)
            done += entry.bytes
            if size != entry.bytes or digest.hexdigest() != entry.sha256:
                raise BundleError(f"{name} in {self._called} is not what its manifest says: the archive is damaged")
        (folder / names.MANIFEST_FILE).write_bytes(self.text)

    def _open(self, name: str) -> IO[bytes]:
        member = self._members.get(self._prefix + name)
        if member is None:
            raise BundleError(f"{self._called} lacks {name}, which its manifest lists")
        with _readable(self._called):
            return member()


@contextmanager
def opened(path: Path, called: str) -> Iterator[Archived]:
    """The bundle in an archive that its user knows as `called`.

    Raises:
        BundleError: it is no archive, a damaged one, or one without a bundle.
    """
    with ExitStack() as stack:
        with _readable(called):
            members = _members(path, stack)
        yield Archived(called, members)


def ending_of(name: str) -> str:
    """By what a file's name says that it is an archive; empty where it does not.

    >>> ending_of("story.mirror.TAR.gz"), ending_of("v1.zip"), ending_of("zip.mirror")
    ('.TAR.gz', '.zip', '')
    """
    found = next((ending for ending in _ENDINGS if name.lower().endswith(ending)), "")
    return name[len(name) - len(found) :]


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar, by what is in it."""
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except (OSError, EOFError):
        return False


def write_archive(stream: IO[bytes], files: Mapping[str, Path | bytes]) -> None:
    """Write a zip of `files` by their names in it, uncompressed, as weights do not get smaller."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _WHEN)
            entry.external_attr = 0o644 << 16
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            with archive.open(entry, "w", force_zip64=size >= zipfile.ZIP64_LIMIT) as member:
                if isinstance(content, bytes):
                    member.write(content)
                else:
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, member, _CHUNK)


@contextmanager
def _readable(called: str) -> Iterator[None]:
    """Within it, whatever a damaged archive makes its reader raise becomes a `BundleError`."""
    try:
        yield
    except (*_DAMAGED, OSError) as error:
        raise BundleError(f"{called} is no archive that can be read to its end ({error})") from error


def _read(stream: IO[bytes], num_bytes: int, called: str) -> bytes:
    with _readable(called):
        return stream.read(num_bytes)


def _members(path: Path, stack: ExitStack) -> dict[str, Open]:
    """What opens each regular file of an archive, by name, in the archive's order."""
    if zipfile.is_zipfile(path):
        archive = stack.enter_context(zipfile.ZipFile(path))
        return {entry.filename: partial(archive.open, entry) for entry in archive.infolist() if not entry.is_dir()}
    if not tarfile.is_tarfile(path):
        raise EOFError("neither a zip nor a tar")
    taped = stack.enter_context(tarfile.TarFile.open(path))
    return {entry.name.removeprefix("./"): partial(_from_tar, taped, entry) for entry in taped if entry.isfile()}


def _from_tar(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(entry)
    assert stream is not None, "a regular file"
    return stream
