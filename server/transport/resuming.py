"""What a front must know of an answer to have another server go on with it, between the lines of the answer itself.

A front sends the header `x-mirrorsd-resume` with its request: `{}` at first. The answer is then a stream whatever was
asked for, and holds comments of its own: behind what belongs together stands what has been said with it. Everybody
else ignores comments. Where the stream breaks off, the front asks another server: with the ids in the body, as
`continue_from`, and in the header what it was told besides. That one sends what is missing.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mirrorsd.server.errors import ApiError

HEADER = "x-mirrorsd-resume"
MARK = b": mirrorsd "
FRAME_END = b"\n\n"
_LONGEST = 1024


class Resumption(BaseModel):
    """The header's content: all that a front knows of an answer besides its ids and its seed.

    Attributes:
        id: of the answer; None where nothing of it was sent yet.
        created: when it began, in seconds since 1970.
        fingerprint: of the server that began it.
        num_ended: choices of which everything was sent.
        num_events: events that were sent, where they are numbered.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[a-z]{2,8}[-_][0-9a-f]{32}$")] | None = None
    created: Annotated[int, Field(ge=0)] | None = None
    fingerprint: Annotated[str, Field(max_length=64)] | None = None
    num_ended: Annotated[int, Field(ge=0)] = 0
    num_events: Annotated[int, Field(ge=0)] = 0

    @property
    def is_begun(self) -> bool:
        """Whether something was sent already."""
        return self.id is not None


class Refusal(NamedTuple):
    """Why a server has not answered a request to its end."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def error(self) -> dict[str, Any]:
        """Its `error`; empty where it is none of ours."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        error = found.get("error") if isinstance(found, dict) else None
        return error if isinstance(error, dict) else {}


def read_resumption(text: str | None) -> Resumption | None:
    """The header of a request; None where it has none.

    Raises:
        ApiError: it says something else than it may.
    """
    if text is None:
        return None
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} characters")
        return Resumption.model_validate_json(text)
    except (ValidationError, ValueError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ApiError(400, f"The header {HEADER} cannot be read: {first}.", code="invalid_header") from None


def continued(given: Sequence[int] | Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    """What the choices of a request go on from, by its `continue_from`, as far as it says.

    >>> continued([5, 6]), continued([[5], []]), continued(None)
    ([[5, 6]], [[5], []], [])
    """
    ids = given or []
    return [ids] if ids and isinstance(ids[0], int) else ids  # type: ignore[list-item, return-value]


def mark_frame(facts: Mapping[str, Any]) -> bytes:
    """A comment of a stream that says something to a front.

    >>> mark_frame({"choice": 0, "ids": [5]}).strip()
    b': mirrorsd {"choice":0,"ids":[5]}'
    """
    return MARK + json.dumps(facts, separators=(",", ":")).encode() + b"\n\n"


def read_mark(frame: bytes) -> dict[str, Any] | None:
    """What such a comment says; None of any other frame.

    >>> read_mark(b': mirrorsd {"is_done":true}'), read_mark(b": ping"), read_mark(b"data: {}")
    ({'is_done': True}, None, None)
    """
    found: dict[str, Any] | None = json.loads(frame[len(MARK) :]) if frame.startswith(MARK) else None
    return found


def passed_back(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Those headers of a server's answer that a front has for its client, too.

    >>> passed_back({"retry-after": "3", "date": "today"}, ("retry-after", "location"))
    {'retry-after': '3'}
    """
    return {name: headers[name] for name in names if name in headers}


async def frames_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The frames of a stream of events, without what ends them, however its bytes come; a torn one is left out."""
    rest = bytearray()
    async for piece in pieces:
        looked_at = max(0, len(rest) - 1)  # a long frame is not looked through again at every piece of it
        rest += piece
        while (end := rest.find(FRAME_END, looked_at)) >= 0:
            yield bytes(rest[:end])
            del rest[: end + len(FRAME_END)]
            looked_at = 0
