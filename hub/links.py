"""A bundle in an archive at an address: fetched, checked against the hash that the address names, taken out.

Owns: what is asked of a server first, and when an unfinished archive may be gone on from. Does not own: the transfer
(`downloads`), the archive (`archives`), where the bundle is kept (`bundles`).
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urldefrag, urlsplit

from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.hub.archives import opened
from mirrorsd.hub.asking import lacks_room, patience_s, readable_bytes, web
from mirrorsd.hub.downloads import LedAstrayError, download

OnProgress = Callable[[str, float], None]
_ARCHIVE, _MARK = "archive", "archive.etag"
_HASH_DIGITS = 64
_HERE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An archive's address, and the SHA-256 that its content must have; empty where nobody says."""

    address: str
    sha256: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `https://HOST/PATH[#sha256=DIGITS]`.

        >>> Link.parse("https://host/a.zip").address
        'https://host/a.zip'

        Raises:
            ConfigError: no host, a hash that is none, or neither encryption nor a hash.
        """
        address, fragment = urldefrag(text)
        digest = parse_qs(fragment).get("sha256", [""])[0].lower()
        parts = urlsplit(address)
        if not parts.hostname:
            raise ConfigError(f"{text} names no host; an archive's address is https://HOST/PATH.")
        if fragment and (len(digest) != _HASH_DIGITS or set(digest) - set("0123456789abcdef")):
            raise ConfigError(f"{text} ends in #{fragment}; allowed: #sha256= and {_HASH_DIGITS} hexadecimal digits.")
        if parts.scheme == "http" and not digest and parts.hostname not in _HERE:
            raise ConfigError(
                f"{text} can be changed on its way here: use https, or add the archive's hash, {address}#sha256=DIGITS."
            )
        return cls(address=address, sha256=digest)

    @property
    def host(self) -> str:
        """Who is asked."""
        return urlsplit(self.address).netloc.rpartition("@")[2]

    @property
    def file(self) -> str:
        """The last part of the path, which has no slash."""
        return unquote(urlsplit(self.address).path).rpartition("/")[2].replace("/", "") or self.host


def fetch_archive(link: Link, place: Path, folder: Path, show: OnProgress) -> str:
    """Fetch an archive into `place`, take its bundle out into `folder`, and return the bundle's name.

    Raises:
        BundleError: the server refuses, the archive has another hash or holds no whole bundle, the disk has no room.
        HTTPError, OSError: the server breaks off, or a folder cannot be written.
    """
    archive = place / _ARCHIVE
    size = _prepare(link, archive)
    show(f"fetching {link.file} from {link.host}{'' if size is None else f', {readable_bytes(size)}'}", 0.0)

    def tell(done: int) -> None:
        of_all = "" if size is None else f" of {readable_bytes(size)}"
        show(f"fetching {link.file}: {readable_bytes(done)}{of_all}", min(1.0, done / size) if size else 0.5)

    with _refusals(link):
        download(link.address, archive, num_bytes=size, on_bytes=tell, has_hash=bool(link.sha256))
    if link.sha256 and (digest := describe_file(archive).sha256) != link.sha256:
        archive.unlink()
        raise BundleError(
            f"{link.address} has SHA-256 {digest}, {link.sha256} was expected: it is another archive, or a damaged one"
        )
    try:
        name = take_out(archive, link.file, folder, show)
    except BundleError as error:
        archive.unlink()
        raise BundleError(f"{error}. It came from {link.address}; a repository on the hub is hf:ORG/NAME") from error
    archive.unlink()
    archive.with_name(_MARK).unlink(missing_ok=True)
    return name


def take_out(archive: Path, called: str, folder: Path, show: OnProgress) -> str:
    """Unpack the bundle of an archive that its user knows as `called`, and return the bundle's name.

    The folder is emptied first: what an earlier try left there may be of another archive.

    Raises:
        BundleError: it holds no whole bundle, or the disk has no room.
        OSError: the folder cannot be written.
    """
    with opened(archive, called) as archived:
        total = sum(entry.bytes for entry in archived.manifest.files.values())
        shutil.rmtree(folder)
        folder.mkdir()
        if lack := lacks_room(folder, total):
            raise BundleError(f"{called} {lack}, or name another place by MIRRORSD_CACHE")
        show(f"unpacking {called}, {readable_bytes(total)}", 0.0)
        archived.unpack(folder, lambda done: show(f"unpacking {called}", done / max(1, total)))
        return archived.name


def _prepare(link: Link, archive: Path) -> int | None:
    """Ask what the server has, and drop what an earlier try left of anything else; the archive's size, if it is known.

    What is there is of the same archive if the hash will show it, or the server's mark of its content is the same.
    """
    answer = web().get_session().head(link.address, headers={"Accept-Encoding": "identity"}, timeout=patience_s())
    known = answer.headers if answer.is_success else {}  # some servers know no HEAD: what is wrong shows at the GET
    mark, marked = known.get("ETag", ""), archive.with_name(_MARK)
    is_same = mark and not mark.startswith("W/") and marked.is_file() and marked.read_text(encoding="utf-8") == mark
    if not (is_same or link.sha256):
        archive.unlink(missing_ok=True)
    marked.write_text(mark, encoding="utf-8")
    size = int(known["Content-Length"]) if known.get("Content-Length", "").isdigit() else None
    had = archive.stat().st_size if archive.exists() else 0
    if size is not None and (lack := lacks_room(archive.parent, size - had)):
        raise BundleError(f"{link.address} {lack}, or name another place by MIRRORSD_CACHE")
    return size


@contextmanager
def _refusals(link: Link) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except LedAstrayError as error:
        raise BundleError(
            f"{link.address} cannot be trusted: {error}. Add the archive's hash (#sha256=DIGITS), or tell its owner"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise BundleError(
            f"{link.host} does not give {link.address}: status {status}. Is the address right?"
        ) from error
