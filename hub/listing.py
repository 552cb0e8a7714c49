"""Ready bundles that others have pushed, as the hub lists them by their tag.

Owns: the question, and a bound on the wait for it. Does not own: what is fetched already (`bundles`).
"""

from dataclasses import dataclass
from typing import Any

from mirrorsd.graphs.errors import BundleError
from mirrorsd.hub.asking import patience_s, the_hub, web
from mirrorsd.hub.packing import TAG

_MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A repository: what names it, and the bytes that all its revisions take; None where the hub does not say."""

    reference: str
    num_bytes: int | None


def offered_bundles() -> list[Offered]:
    """Ask the hub for repositories that say they are mirror bundles, most used first.

    Raises:
        BundleError: the hub does not answer, or not with a list.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    hub = the_hub()
    asked = {"filter": TAG, "expand[]": "usedStorage", "sort": "downloads", "limit": _MOST}
    try:
        headers, address = web().build_hf_headers(), f"{hub.endpoint}/api/models"
        answer = web().get_session().get(address, params=asked, headers=headers, timeout=patience_s())
        web().hf_raise_for_status(answer)
        return [_read(one) for one in answer.json()]
    except (HTTPError, OSError, ValueError, LookupError, TypeError) as error:
        raise BundleError(f"{hub.endpoint} gives no list of bundles ({error}); try again later") from error


def _read(one: Any) -> Offered:
    size = one.get("usedStorage")
    return Offered(reference=f"hf:{one['id']}", num_bytes=size if isinstance(size, int) else None)
