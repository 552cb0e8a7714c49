"""A bundle made ready for others: a folder for the hub, or one archive; and pushed.

Owns: what is taken along: the files that the manifest lists, and the card. Does not own: the card's words.
"""

import errno
import shutil
from pathlib import Path

from mirrorsd.graphs import names
from mirrorsd.graphs.atomic_folder import atomic_folder
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.graphs.whole_file import whole_file
from mirrorsd.hub.archives import SUFFIX, ending_of, write_archive
from mirrorsd.hub.asking import explained, lacks_room, patience_s, the_hub

CARD_FILE = "README.md"
TAG = "mirrorsd"
"""By which the hub finds bundles."""
PLACEHOLDER = "hf:OWNER/NAME"
"""Stands in a card until it is known where the bundle is pushed to."""


def pack(bundle: Path, output: Path, card: str, *, overwrite: bool) -> int:
    """Write a bundle and its card to `output`: one archive where that ends in `.zip`, else a folder.

    Returns:
        The bytes that were written.

    Raises:
        BundleError: it is no bundle, or a damaged one; the disk has no room.
        ConfigError: `output` is there already, lies in the bundle, or is named like another kind of archive; its name
            or the bundle's is no text.
        ExportError: the folder cannot be written.
    """
    for path in (bundle.resolve(), output):
        _check_name(path.name)
    manifest = read_bundle(bundle)
    if output.resolve().is_relative_to(bundle.resolve()):
        raise ConfigError(f"{output} lies in the bundle itself; write it elsewhere.")
    if output.suffix != SUFFIX and ending_of(output.name):
        raise ConfigError(
            f"{output} has the name of another kind of archive: {SUFFIX} is what `chat` and others fetch."
        )
    if output.suffix == SUFFIX and output.exists() and not (overwrite and output.is_file()):
        raise ConfigError(f"{output} exists already; choose another name, or replace it with --overwrite.")
    files = {name: bundle / name for name in (names.MANIFEST_FILE, *manifest.files)}
    total = sum(path.stat().st_size for path in files.values()) + len(card.encode())
    if lack := lacks_room(output.absolute().parent, total):
        raise BundleError(f"{output} {lack}, or write it elsewhere")
    if output.suffix == SUFFIX:
        prefix = f"{output.name.removesuffix(SUFFIX).removesuffix('.mirror')}.mirror"
        inside: dict[str, Path | bytes] = {**files, CARD_FILE: card.encode()}
        try:
            with whole_file(output) as stream:
                write_archive(stream, {f"{prefix}/{name}": content for name, content in inside.items()})
        except OSError as error:
            reason = "no space is left" if error.errno == errno.ENOSPC else error
            raise BundleError(f"{output} cannot be written: {reason}; nothing is left of it") from error
        return total
    with atomic_folder(output, overwrite=overwrite) as folder:
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        (folder / CARD_FILE).write_text(card, encoding="utf-8", newline="")
    return total


def _check_name(name: str) -> None:
    """Refuse a name that neither an archive nor a card can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("ascii", "backslashreplace").decode()
        raise ConfigError(f"{shown} is no name in UTF-8, which archives and cards need: choose another.") from None


def sha256_of(archive: Path) -> str:
    """The hash that pins an archive's address."""
    return describe_file(archive).sha256


def push(folder: Path, repository: str, *, is_private: bool) -> str:
    """Upload a packed folder, and return the reference that names what is there now.

    Raises:
        BundleError: it is no bundle or a damaged one; the hub refuses, or does not answer.
        ConfigError: the folder has no card; the repository holds something else.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    manifest = read_bundle(folder)
    card = folder / CARD_FILE
    if not card.is_file():
        raise ConfigError(f"{folder} has no {CARD_FILE}: pack the bundle first, `mirrorsd pack {folder} -o FOLDER`.")
    hub = the_hub()
    try:
        with explained(hub, repository, None, BundleError):
            hub.create_repo(repository, private=is_private, exist_ok=True)
            info = hub.model_info(repository, timeout=patience_s())
            if is_private and not info.private:
                raise ConfigError(f"{repository} is there already, and public: --private is for new ones.")
            there = {file.rfilename for file in info.siblings or ()} - {".gitattributes", CARD_FILE}
            if there and names.MANIFEST_FILE not in there:
                raise ConfigError(
                    f"{repository} holds files that are no bundle ({', '.join(sorted(there)[:3])}...); give the "
                    "bundle a repository of its own."
                )
            wanted = [names.MANIFEST_FILE, CARD_FILE, *manifest.files]
            text = card.read_text(encoding="utf-8").replace(PLACEHOLDER, f"hf:{repository}")
            hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                allow_patterns=[name for name in wanted if name != CARD_FILE],
                delete_patterns=sorted(there - set(wanted)) or None,
                commit_message="Upload a mirror bundle",
            )
            commit = hub.upload_file(
                path_or_fileobj=text.encode(),
                path_in_repo=CARD_FILE,
                repo_id=repository,
                commit_message="Write its card",
            )
    except HfHubHTTPError as error:
        raise BundleError(f"{hub.endpoint} refuses {repository}: {error}") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise BundleError(
            f"{repository} was not pushed whole: {error.__cause__ or error}. The same command goes on with the rest"
        ) from error
    return f"hf:{repository}@{commit.oid}"
