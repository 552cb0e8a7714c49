"""A bundle in a repository of the hub: which revision, and its files, by the hashes of its manifest.

Owns: refusing what is no bundle, or cannot become a whole one, before anything large is fetched. Does not own: where
the files go (`bundles`), the transfer (`downloads`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.manifest_values import read_manifest
from mirrorsd.hub.asking import explained, lacks_room, patience_s, readable_bytes, the_hub, web
from mirrorsd.hub.downloads import download

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A repository as it is at one commit.

    Attributes:
        repository: `OWNER/NAME`.
        commit: all 40 digits.
        sizes: bytes of each file; None where the hub does not say.
        hashes: SHA-256 of the large ones.
    """

    repository: str
    commit: str
    sizes: Mapping[str, int | None]
    hashes: Mapping[str, str]


def find_revision(repository: str, revision: str | None) -> Revision:
    """Ask the hub what a repository is at a revision, by default its newest.

    Raises:
        BundleError: there is no such repository or revision, or it may not be read.
        HTTPError, OSError: the hub does not answer.
    """
    hub = the_hub()
    with explained(hub, repository, revision, BundleError):
        info = hub.model_info(repository, revision=revision, files_metadata=True, timeout=patience_s())
    files = info.siblings or ()
    return Revision(
        repository=repository,
        commit=str(info.sha),
        sizes={file.rfilename: file.size for file in files},
        hashes={file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None},
    )


def fetch_files(found: Revision, folder: Path, show: OnProgress) -> None:
    """Fetch a bundle's manifest and the files that it lists; what is there of an earlier try is gone on from.

    Raises:
        BundleError: the repository holds no bundle or a damaged one, a file is not what the manifest says, or the disk
            has no room.
        HTTPError, OSError: the hub breaks off, or the folder cannot be written.
    """
    name = found.repository
    if names.MANIFEST_FILE not in found.sizes:
        raise BundleError(
            f"hf:{name} has no {names.MANIFEST_FILE}, so it is no bundle. Make one of the model: mirrorsd export {name}"
        )
    _fetch(found, names.MANIFEST_FILE, folder, lambda done: None)
    manifest = _manifest_in(found, folder)
    _check_offered(found, manifest)
    total = sum(entry.bytes for entry in manifest.files.values())
    missing = total - sum(_bytes_of(folder / file) for file in manifest.files)
    if missing > 0 and (lack := lacks_room(folder, missing)):
        raise BundleError(f"hf:{name} {lack}, or name another place by MIRRORSD_CACHE")
    show(f"fetching {name}, {readable_bytes(total)}, revision {found.commit[:8]}", 0.0)
    before = 0
    for file, entry in manifest.files.items():

        def tell(done: int, before: int = before) -> None:
            stage = f"fetching {name}: {readable_bytes(before + done)} of {readable_bytes(total)}"
            show(stage, min(1.0, (before + done) / max(1, total)))

        _fetch(found, file, folder, tell, entry.bytes)
        if (digest := describe_file(folder / file).sha256) != entry.sha256:
            (folder / file).unlink()
            raise BundleError(
                f"{file} of hf:{name} came with SHA-256 {digest[:12]}..., its manifest says {entry.sha256[:12]}.... "
                "It is fetched anew at the next try; if that ends alike, tell its owner"
            )
        before += entry.bytes


def _fetch(
    found: Revision, file: str, folder: Path, on_bytes: Callable[[int], None], num_bytes: int | None = None
) -> None:
    from huggingface_hub.file_download import hf_hub_url

    hub = the_hub()
    link = hf_hub_url(found.repository, file, revision=found.commit, endpoint=hub.endpoint)
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    size = found.sizes[file] if num_bytes is None else num_bytes
    with explained(hub, found.repository, found.commit, BundleError):
        download(link, path, headers=web().build_hf_headers(), num_bytes=size, on_bytes=on_bytes)


def _manifest_in(found: Revision, folder: Path) -> Manifest:
    path = folder / names.MANIFEST_FILE
    origin = f"{names.MANIFEST_FILE} of hf:{found.repository}"
    try:
        return read_manifest(read_text(path), origin=origin)
    except DocumentError as error:
        path.unlink()
        raise BundleError(f"{origin} {error}") from error
    except BundleError:
        path.unlink()
        raise


def _check_offered(found: Revision, manifest: Manifest) -> None:
    """Refuse a repository whose files are not those of the manifest, as far as the hub says what they are."""
    for file, entry in manifest.files.items():
        if file not in found.sizes:
            raise BundleError(f"hf:{found.repository} lacks {file}, which its manifest lists; tell its owner")
        size, digest = found.sizes[file], found.hashes.get(file, entry.sha256)
        if size not in (None, entry.bytes) or digest != entry.sha256:
            raise BundleError(
                f"{file} of hf:{found.repository} has {size} bytes and SHA-256 {digest[:12]}..., its manifest says "
                f"{entry.bytes} and {entry.sha256[:12]}...: the repository is damaged; tell its owner"
            )


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
