"""Asking the hub: who is asked, what its refusals mean in words, how large something is, and what the disk has left.

Owns: the one list of what the hub may answer. Does not own: what is asked for, the protocol and who the user is
(`huggingface_hub`: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirrorsd.graphs.errors import MirrorError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi

REPOSITORY = r"[\w-][\w.-]*/[\w-][\w.-]*"
"""The pattern of `OWNER/NAME`."""


def the_hub() -> "HfApi":
    """The hub that HF_ENDPOINT names, else the public one."""
    from huggingface_hub.hf_api import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def web() -> Any:
    """Where `huggingface_hub` has its session, headers and refusals, which it does not export to type checkers."""
    from huggingface_hub import utils

    return utils


def patience_s() -> float:
    """Seconds that the hub gets for an answer; HF_HUB_ETAG_TIMEOUT sets it."""
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    return float(HF_HUB_ETAG_TIMEOUT)


@contextmanager
def explained(hub: "HfApi", repository: str, revision: str | None, kind: type[MirrorError]) -> Iterator[None]:
    """Within it, what the hub refuses about a repository becomes a `kind` that says what to do.

    A hub that does not answer at all is none of these: `huggingface_hub.errors.HTTPError`, or an `OSError`.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise kind(
            f"{repository} is gated: its owner wants you to agree to terms first. Do so at {hub.endpoint}/"
            f"{repository}, then say who you are: `hf auth login`, or the variable HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise kind(f"{repository} has no revision {revision!r}; leave @... away for the latest") from error
    except errors.RepositoryNotFoundError as error:
        raise kind(
            f"{repository} is no folder here, and {hub.endpoint} has no model of that name, or it is private "
            "(then `hf auth login` first)"
        ) from error
    except UnicodeEncodeError as error:
        raise kind(
            f"{hub.endpoint} was not asked for {repository}: the token holds a character that cannot be sent. Look at "
            "the variable HF_TOKEN, or run `hf auth login` again"
        ) from error
    except errors.HfHubHTTPError as error:
        raise kind(f"{hub.endpoint} did not give {repository}: {error}. Try again later") from error


def readable_bytes(num_bytes: float) -> str:
    """A size as disks and downloads are sold.

    >>> readable_bytes(2_400_000), readable_bytes(16_060_556_376)
    ('2 MB', '16.1 GB')
    """
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{max(1, round(num_bytes / 1e6))} MB"


def lacks_room(folder: Path, num_bytes: int) -> str | None:
    """Words about the disk of a folder, which need not exist, where it has no room for `num_bytes`; else None."""
    place = next(found for found in (folder, *folder.parents) if found.exists())
    free = shutil.disk_usage(place).free
    if free >= num_bytes:
        return None
    return f"takes {readable_bytes(num_bytes)}, and {readable_bytes(free)} are free in {place}; make room"
