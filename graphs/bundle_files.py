"""The files of a bundle on disk: sizes, SHA-256, and the check that they are what the manifest says.

Hashing a large bundle takes time, so a passed check is remembered in the user's cache, keyed by the files' sizes and
modification times.
"""

import hashlib
from pathlib import Path, PurePosixPath

from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import FileEntry, Manifest
from mirrorsd.graphs.manifest_values import read_manifest
from mirrorsd.graphs.user_cache import passed_check, remember_check
from mirrorsd.graphs.whole_file import is_gguf

_LOADED_FOLDERS = (names.TARGET_FOLDER, names.DRAFT_FOLDER, names.TOKENIZER_FOLDER)


def describe_file(path: Path) -> FileEntry:
    """Size and SHA-256 of one file."""
    with path.open("rb") as stream:
        return FileEntry(bytes=path.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def read_bundle(folder: Path) -> Manifest:
    """Read the manifest of a bundle and check every file it lists.

    Raises:
        BundleError: no such folder, no manifest or one that was changed, a file that is missing, truncated, changed,
            unreadable or not listed.
    """
    manifest_path = folder / names.MANIFEST_FILE
    if not manifest_path.is_file():
        raise BundleError(_what_it_is(folder))
    try:
        text = read_text(manifest_path)
    except DocumentError as error:
        raise BundleError(f"{manifest_path} {error}. Export the bundle again.") from error
    manifest = read_manifest(text, origin=str(manifest_path))
    try:
        _check_unlisted(folder, manifest)
        _check_files(folder, manifest, text)
    except OSError as error:
        raise BundleError(f"{folder} cannot be read: {error}. Copy the bundle again, or export it again.") from error
    return manifest


def _what_it_is(path: Path) -> str:
    """What a path that is no bundle is, and the line that makes one of it."""
    line = f"Make a bundle of it first: mirrorsd export {path}"
    if path.is_file() and is_gguf(path):
        return f"{path} is a GGUF file, a model but not a bundle. {line} --draft DRAFT"
    if (path / "config.json").is_file():
        return f"{path} is a Hugging Face checkpoint, a model but not a bundle. {line} --draft DRAFT"
    if not path.is_dir():
        is_name = len(path.parts) == 2 and not path.is_absolute() and path.suffix != ".mirror" and not path.exists()
        like = f" If it is a name on the Hugging Face hub: mirrorsd export {path.as_posix()}" if is_name else ""
        return f"{path} is not a folder. A bundle is made by `mirrorsd export ... -o NAME.mirror`.{like}"
    return f"{path} has no {names.MANIFEST_FILE}, so it is not a bundle (or its export was cut short)."


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    """Refuse files that nobody has vouched for where files are loaded from; hidden ones are the system's own."""
    listed = {PurePosixPath(name) for name in manifest.files}
    for part in _LOADED_FOLDERS:
        for path in sorted((folder / part).rglob("*")):
            inside = PurePosixPath(path.relative_to(folder).as_posix())
            is_folder = path.is_dir() and not path.is_symlink()
            if not (is_folder or inside in listed or path.name.startswith(".")):
                raise BundleError(
                    f"{path} is not listed in {names.MANIFEST_FILE}: it was put there after the export. "
                    "Remove it, or copy the bundle again."
                )


def _check_files(folder: Path, manifest: Manifest, manifest_text: str) -> None:
    root = folder.resolve()
    stamps: dict[str, list[int]] = {}
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing. Copy the whole bundle, or export it again.")
        if not path.resolve().is_relative_to(root):
            raise BundleError(f"{path} is a link that leaves the bundle's folder: do not use this bundle.")
        stat = path.stat()
        if stat.st_size != entry.bytes:
            raise BundleError(
                f"{path} has {stat.st_size} bytes, the manifest says {entry.bytes}: truncated or replaced. "
                "Copy the bundle again, or export it again."
            )
        stamps[name] = [stat.st_size, stat.st_mtime_ns]
    seal: dict[str, object] = {"manifest": hashlib.sha256(manifest_text.encode()).hexdigest(), "stamps": stamps}
    if passed_check(folder, seal):
        return
    for name, entry in manifest.files.items():
        found = describe_file(folder / name).sha256
        if found != entry.sha256:
            raise BundleError(
                f"{folder / name} is damaged: SHA-256 {found[:12]}..., the manifest says {entry.sha256[:12]}.... "
                "Copy the bundle again, or export it again."
            )
    remember_check(folder, seal)
