"""Names instead of folders: a model on the Hugging Face hub, fetched once and pinned to the revision that it has.

Owns: what counts as a name, and fetching what an export reads. Does not own: the cache and the protocol
(`huggingface_hub`: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN), the words for a refusal, what is in the files.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError
from mirrorsd.hub.asking import REPOSITORY, explained, lacks_room, patience_s, readable_bytes, the_hub

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi

Tell = Callable[[str], None]
FORMS = "OWNER/NAME[@REVISION], or a file of it: OWNER/NAME/FILE.gguf[@REVISION]"
"""What a name may look like."""
_FILE, _REVISION = r"/(?P<file>(?:[\w.-]+/)*[\w.-]+\.(?i:gguf))", r"(?P<rev>[\w.-]+(?:/[\w.-]+)*)"
_PAGE_REVISION = r"(?P<rev>refs/\w+/\d+|[\w.-]+)"
_NAME = re.compile(rf"(?:hf:)?(?P<repository>{REPOSITORY})(?:{_FILE}|/)?(?:@{_REVISION})?")
_HOST = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
_PAGES = (
    re.compile(rf"{_HOST}(?P<repository>{REPOSITORY})(?P<file>)(?:/tree/{_PAGE_REVISION})?/?"),
    re.compile(rf"{_HOST}(?P<repository>{REPOSITORY})/(?:blob|resolve)/{_PAGE_REVISION}{_FILE}(?:\?.*)?"),
)
"""Addresses of the hub's pages, as a browser shows them: of a repository and of a file."""
_PART = re.compile(r"-\d{5}(?=-of-\d{5}\.(?i:gguf)$)")
"""Of a file that is one of several: all of them are read."""
_CONFIG = "config.json"
_WANTED = ("*.json", "*.safetensors", "*.jinja", names.CALIBRATION_FILE, *names.LICENCE_FILES)
_UNWANTED = ("*/*.safetensors", "*/*.json", "consolidated*")
"""The same weights in other forms: what is read lies at the top."""
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

    @property
    def where(self) -> dict[str, Any]:
        """What of the repository is fetched, in the hub's words."""
        unwanted = None if self.file else list(_UNWANTED)
        return {"revision": self.revision, "allow_patterns": self.wanted, "ignore_patterns": unwanted}


class Origin(NamedTuple):
    """Which repository a folder of the hub's cache is a snapshot of."""

    repository: str
    revision: str


def parse_name(text: str) -> HubName | None:
    """Read a hub name, or the address of its page; None where it cannot be one.

    >>> parse_name("Qwen/Qwen3-8B@refs/pr/3")
    HubName(repository='Qwen/Qwen3-8B', file=None, revision='refs/pr/3')
    >>> parse_name("https://huggingface.co/o/n/blob/main/q/Q4.gguf")
    HubName(repository='o/n', file='q/Q4.gguf', revision='main')
    >>> parse_name("./models/mine") is parse_name("qwen3") is None
    True
    """
    page = unquote(text)
    found = next(filter(None, (_NAME.fullmatch(text), *(pattern.fullmatch(page) for pattern in _PAGES))), None)
    return None if found is None else HubName(found["repository"], found["file"] or None, found["rev"])


def locate(text: str, tell: Tell) -> Path:
    """The folder or file that `text` stands for: itself where it exists, else fetched from the hub by that name.

    Args:
        text: a path or a hub name.
        tell: told what is going to be fetched.

    Raises:
        ExportError: there is no such repository, or it cannot be read; the disk is too full.
    """
    path, name = Path(text), parse_name(text)
    return path if path.exists() or name is None else fetch(name, tell)


def look_at(text: str) -> Path | None:
    """The folder in which a name's config.json lies, fetched alone: what is refused for it costs nothing else.

    None for a path, a GGUF file, which says everything itself, and where the hub does not answer.

    Raises:
        ExportError: there is no such repository, it cannot be read, or it lacks what would be read.
    """
    name = parse_name(text)
    if Path(text).exists() or name is None:
        return None
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub = the_hub()
    with explained(hub, name.repository, name.revision, ExportError):
        info = _ask(hub, name)
        if info is None:
            return None
        _check_files(name, [file.rfilename for file in info.siblings or ()])
        if name.file:
            return None
        with suppress(LocalEntryNotFoundError), _quiet(True), _unbroken(hub, name):
            return Path(hub.snapshot_download(name.repository, revision=info.sha, allow_patterns=[_CONFIG]))
    return None


def fetch(name: HubName, tell: Tell) -> Path:
    """Fetch what an export reads of a repository, as far as the cache lacks it; see `locate`."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub = the_hub()
    with explained(hub, name.repository, name.revision, ExportError):
        try:
            return _fetch_online(hub, name, tell)
        except LocalEntryNotFoundError as error:
            raise _not_here(hub, name) from error


def origin_of(path: Path) -> Origin | None:
    """Where a folder or a file of the hub's cache comes from; None for any other. A link there stands for its content.

    >>> origin_of(Path("/cache/models--Qwen--Qwen3-8B/snapshots/" + "0" * 40)).repository
    'Qwen/Qwen3-8B'
    """
    resolved = path.resolve()
    named = resolved if path.name == ".." else path.parent.resolve() / path.name
    for folder in (named, *named.parents, resolved, *resolved.parents):
        found = _CACHED.fullmatch(folder.parent.parent.name)
        if found is not None and folder.parent.name == "snapshots":
            return Origin(f"{found['owner']}/{found['name']}", folder.name)
    return None


def _fetch_online(hub: "HfApi", name: HubName, tell: Tell) -> Path:
    """Look up the newest revision and fetch that; where the hub does not answer, take what the cache has."""
    info = _ask(hub, name)
    if info is None:
        found = _from_cache(hub, name)
        tell(f"{name.repository}: the hub does not answer; taking revision {_revision_in(found)[:8]} from the cache")
        return found
    _check_files(name, [file.rfilename for file in info.siblings or ()])
    with _quiet(True):
        planned = hub.snapshot_download(name.repository, dry_run=True, **name.where)
    missing = sum(file.file_size or 0 for file in planned if file.will_download)
    if missing:
        _check_disk(name, missing)
        tell(f"{name.repository}: fetching {readable_bytes(missing)}, revision {str(info.sha)[:8]}")
    with _quiet(not missing or not sys.stderr.isatty()), _unbroken(hub, name):
        folder = Path(hub.snapshot_download(name.repository, **name.where))
    return folder / name.file if name.file else folder


def _ask(hub: "HfApi", name: HubName) -> Any:
    """What the hub says of a revision; None where it does not answer."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        return hub.model_info(name.repository, revision=name.revision, files_metadata=True, timeout=patience_s())
    except HfHubHTTPError:  # the hub did answer
        raise
    except (HTTPError, OSError):
        return None


@contextmanager
def _unbroken(hub: "HfApi", name: HubName) -> Iterator[None]:
    """Within it, a hub that breaks off becomes an `ExportError`."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except HfHubHTTPError:
        raise
    except (HTTPError, RuntimeError) as error:
        raise ExportError(
            f"{hub.endpoint} broke off while {name.repository} was fetched ({error or type(error).__name__}); what has "
            "come is kept: the same command again fetches the rest"
        ) from error


def _check_files(name: HubName, files: Sequence[str]) -> None:
    """Refuse a repository that lacks what would be read, before anything is fetched."""
    if name.file is not None:
        if name.file not in files:
            raise ExportError(f"{name.repository} has no file {name.file}")
    elif not any(file.endswith(".safetensors") and "/" not in file for file in files):
        gguf = next((file for file in files if file.lower().endswith(".gguf")), None)
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
    with _quiet(True):
        folder = Path(hub.snapshot_download(name.repository, local_files_only=True, **name.where))
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
    found = origin_of(path)
    return found.revision if found else "unknown"


def _check_disk(name: HubName, num_bytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    if lack := lacks_room(Path(HF_HUB_CACHE), num_bytes):
        raise ExportError(f"{name.repository} {lack}, or name another place by HF_HOME")
