"""Names instead of folders: a model on the Hugging Face hub, fetched once and pinned to the revision that it has.

Owns: what counts as a name, fetching what an export reads, and saying in words why that is not possible. Does not own:
the cache and the protocol (`huggingface_hub`: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN), what is in the files.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mirrorsd.graphs.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Tell = Callable[[str], None]
_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?P<file>(?:/[\w.-]+)*/[\w.-]+\.gguf)?(?:@(?P<rev>[\w.-]+))?"
)
_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.gguf$)")
"""Of a file that is one of several: all of them are read."""
_WANTED = ("*.json", "*.safetensors", "*.jinja", "README.md", "LICENSE*", "NOTICE*")
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


class HubName(NamedTuple):
    """`OWNER/NAME[@REVISION]`, or a file in it: `OWNER/NAME/FILE.gguf`."""

    repository: str
    file: str | None
    revision: str | None

    @property
    def wanted(self) -> list[str]:
        """Patterns of the files that an export reads."""
        return [_PART.sub("-?????", self.file)] if self.file else list(_WANTED)


class Origin(NamedTuple):
    """Which repository a folder of the hub's cache is a snapshot of."""

    repository: str
    revision: str


def parse_name(text: str) -> HubName | None:
    """Read a hub name; None where it cannot be one.

    >>> parse_name("Qwen/Qwen3-8B@main")
    HubName(repository='Qwen/Qwen3-8B', file=None, revision='main')
    >>> parse_name("./models/mine") is parse_name("qwen3") is None
    True
    """
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    return HubName(found["repository"], found["file"].lstrip("/") if found["file"] else None, found["rev"])


def locate(text: str, tell: Tell) -> Path:
    """The folder or file that `text` stands for: itself where it exists, else fetched from the hub by that name.

    Args:
        text: a path or a hub name.
        tell: told what is going to be fetched.

    Raises:
        ConfigError: `huggingface_hub` is not installed.
        ExportError: there is no such repository, or it cannot be read; the disk is too full.
    """
    path, name = Path(text), parse_name(text)
    return path if path.exists() or name is None else fetch(name, tell)


def fetch(name: HubName, tell: Tell) -> Path:
    """Fetch what an export reads of a repository, as far as the cache lacks it; see `locate`."""
    try:
        from huggingface_hub import HfApi, errors
    except ImportError as error:
        raise ConfigError(
            f"fetching {name.repository} needs huggingface_hub: pip install 'mirrorsd[export]'"
        ) from error
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        return _fetch_online(hub, name, tell)
    except errors.GatedRepoError as error:
        raise ExportError(
            f"{name.repository} is gated: its owner wants you to agree to terms first. Do so at {hub.endpoint}/"
            f"{name.repository}, then say who you are: `hf auth login`, or the variable HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ExportError(
            f"{name.repository} has no revision {name.revision!r}; leave @... away for the latest"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ExportError(
            f"{name.repository} is no folder here, and {hub.endpoint} has no model of that name, or it is private "
            "(then `hf auth login` first)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_here(hub, name) from error
    except errors.HfHubHTTPError as error:
        raise ExportError(f"{hub.endpoint} did not give {name.repository}: {error}. Try again later") from error


def origin_of(folder: Path) -> Origin | None:
    """Where a folder of the hub's cache comes from; None for any other folder.

    >>> origin_of(Path("/cache/models--Qwen--Qwen3-8B/snapshots/" + "0" * 40)).repository
    'Qwen/Qwen3-8B'
    """
    found = _CACHED.fullmatch(folder.parent.parent.name)
    if found is None or folder.parent.name != "snapshots":
        return None
    return Origin(f"{found['owner']}/{found['name']}", folder.name)


def readable_bytes(num_bytes: float) -> str:
    """A size as disks and downloads are sold.

    >>> readable_bytes(2_400_000), readable_bytes(16_060_556_376)
    ('2 MB', '16.1 GB')
    """
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{max(1, round(num_bytes / 1e6))} MB"


def _fetch_online(hub: "HfApi", name: HubName, tell: Tell) -> Path:
    """Look up the newest revision and fetch that; where the hub does not answer, take what the cache has."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        info = hub.model_info(name.repository, revision=name.revision, files_metadata=True)
    except HfHubHTTPError:  # the hub did answer
        raise
    except (HTTPError, OSError):
        found = _from_cache(hub, name)
        tell(f"{name.repository}: the hub does not answer; taking revision {_revision_in(found)[:8]} from the cache")
        return found
    _check_files(name, [file.rfilename for file in info.siblings or ()])
    where: dict[str, Any] = {"revision": name.revision, "allow_patterns": name.wanted}
    with _quiet(True):
        planned = hub.snapshot_download(name.repository, dry_run=True, **where)
    missing = sum(file.file_size or 0 for file in planned if file.will_download)
    if missing:
        _check_disk(name, missing)
        tell(f"{name.repository}: fetching {readable_bytes(missing)}, revision {str(info.sha)[:8]}")
    with _quiet(not missing or not sys.stderr.isatty()):
        folder = Path(hub.snapshot_download(name.repository, **where))
    return folder / name.file if name.file else folder


def _check_files(name: HubName, files: Sequence[str]) -> None:
    """Refuse a repository that lacks what would be read, before anything is fetched."""
    if name.file is not None:
        if name.file not in files:
            raise ExportError(f"{name.repository} has no file {name.file}")
    elif not any(file.endswith(".safetensors") for file in files):
        gguf = next((file for file in files if file.endswith(".gguf")), None)
        hint = f"; it has a GGUF file: {name.repository}/{gguf}" if gguf else ""
        raise ExportError(f"{name.repository} has no *.safetensors, which are the weights that are read{hint}")


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """Keep the hub's bars off the terminal."""
    from huggingface_hub import utils

    bars: Any = utils
    if not is_quiet or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


def _from_cache(hub: "HfApi", name: HubName) -> Path:
    where: dict[str, Any] = {"revision": name.revision, "allow_patterns": name.wanted}
    with _quiet(True):
        folder = Path(hub.snapshot_download(name.repository, local_files_only=True, **where))
    if name.file is None:
        return folder
    if not (folder / name.file).exists():
        raise _not_here(hub, name)
    return folder / name.file


def _not_here(hub: "HfApi", name: HubName) -> ExportError:
    return ExportError(
        f"{name.repository} is not in the hub's cache, and {hub.endpoint} does not answer (or HF_HUB_OFFLINE is set). "
        "Connect, or give a folder"
    )


def _revision_in(path: Path) -> str:
    found = next((origin for part in (path, *path.parents) if (origin := origin_of(part))), None)
    return found.revision if found else "unknown"


def _check_disk(name: HubName, num_bytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = next(folder for folder in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ExportError(
            f"{name.repository} takes {readable_bytes(num_bytes)}, and {readable_bytes(free)} are free in {place}; "
            "make room, or name another place by HF_HOME"
        )
