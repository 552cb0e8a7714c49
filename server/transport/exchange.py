"""One request and its answer: a body read within bounds, JSON or a stream sent, work that ends with the connection."""

import asyncio
import gc
import json
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from mirrorsd.graphs.errors import ContextLengthError
from mirrorsd.server.errors import ApiError, api_error, prompt_field
from mirrorsd.server.settings import Limits
from mirrorsd.server.transport.guard import values
from mirrorsd.server.transport.refusals import forget_rest
from mirrorsd.server.transport.resuming import HEADER, Resumption, mark_frame, read_resumption

Model = TypeVar("Model", bound=BaseModel)
_EVENT_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache, no-transform"}
UNKNOWN_FIELDS = "x-mirrorsd-unknown-fields"
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class Exchange:
    """A request with the means to answer it.

    Attributes:
        request: Starlette's view of it.
        id: what the `x-request-id` header says, in the answer and in the log.
        status: what it was answered with; None before.
        num_read: bytes of its body.
        more_headers: what the answer's head also says.
        resumption: what a front knows of the answer already; None where no front asks. Known once the body is read.
        num_named: how many events of a stream have been sent whose types are in them; None where they have none.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.request = Request(scope, receive)
        self.id = f"req_{uuid4().hex}"
        self.status: int | None = None
        self.num_read = 0
        self.more_headers: dict[str, str] = {}
        self.is_stream = False
        self.resumption: Resumption | None = None
        self.num_named: int | None = None
        self._heard_at = monotonic()
        self._receive, self._send, self._limits = receive, send, limits

    def recorded(self, send: Send) -> "Exchange":
        """The same request, answered into `send` and whatever becomes of its connection."""
        found = Exchange(self.request.scope, self._receive, send, self._limits)
        found.id, found.more_headers, found.resumption = self.id, dict(self.more_headers), self.resumption
        return found

    async def relay(self, message: Message) -> None:
        """Send what another exchange has sent; a copy, since whoever it passes adds headers for one reader."""
        if message["type"] == "http.response.start":
            self.status, self.is_stream = message["status"], True
            message = {**message, "headers": list(message["headers"])}
        await self._send(message)

    async def read(self, model: type[Model], context: int) -> Model:
        """The body as a model.

        What is read here holds the interpreter, and with it everybody's streams. So bytes, brackets and keys are
        bounded before by what a context of so many tokens can hold.

        Raises:
            ApiError: another content type, too long, too slow, no JSON, or not what the model says.
        """
        headers = self.request.scope["headers"]
        kinds = [value.split(b";")[0].strip().lower() for value in values(headers, b"content-type")]
        if kinds != [b"application/json"]:
            raise ApiError(415, "The Content-Type is not application/json.", code="unsupported_media_type")
        if any(value.strip().lower() != b"identity" for value in values(headers, b"content-encoding")):
            raise ApiError(
                415, "Compressed bodies are not taken: leave Content-Encoding away.", code="content_encoding"
            )
        try:
            async with asyncio.timeout(self._limits.body_s):
                body = await self._read_body(context, model)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {self._limits.body_s:g} seconds.") from None
        self.resumption = read_resumption(self.request.headers.get(HEADER))
        num_marks = sum(map(body.count, (b"[", b"{", b'":')))
        if num_marks > self._limits.marks_for(context):
            raise _too_long(context, f"the request has {num_marks} brackets and keys", model)
        document = None
        try:
            with _no_collection():
                document = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
                return model.model_validate(document)
        except ValidationError as error:
            raise _refusal(error, document) from None
        except ValueError as error:
            raise ApiError(400, f"The body is not JSON: {error}.", code="json_invalid") from None

    async def _read_body(self, context: int, model: type[BaseModel]) -> bytes:
        """What came; more than may be kept is read on and forgotten, since clients read no answer before."""
        found, num_come = bytearray(), 0
        most_kept, most = self._limits.body_bytes_for(context), self._limits.body_bytes
        given = self.request.headers.get("content-length", "")
        if not (given.isdecimal() and int(given) > most):
            async for piece in self.request.stream():
                self.num_read = num_come = num_come + len(piece)
                if num_come > most:
                    break
                if num_come <= most_kept:
                    found += piece
                else:
                    found.clear()
            else:
                if num_come <= most_kept:
                    return bytes(found)
                raise _too_long(context, f"the request has {num_come} bytes", model)
        raise ApiError(413, f"The body has more than {most} bytes.", code="body_too_large")

    def tell_unknown(self, names: Iterable[str]) -> None:
        """Name in the answer's head what of the request has no effect, beside what is named already."""
        told = self.more_headers.get(UNKNOWN_FIELDS, "").split(", ")
        found = dict.fromkeys([*filter(None, told), *(quote(name) or '""' for name in names)])
        if found:
            self.more_headers[UNKNOWN_FIELDS] = ", ".join(found)

    async def json(self, document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON; as the last event of a stream, where a front has been told of its beginning."""
        if self.is_stream:
            await self.event(document)
            await self.end_stream()
            return
        body = json.dumps(document, ensure_ascii=False).encode()
        await self.whole(body, {"content-type": "application/json", **(headers or {})}, status)

    async def whole(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        """Answer with a body of any type."""
        length = {} if status in (204, 304) else {"content-length": str(len(body))}  # which have none by HTTP's rules
        await self._start(status, {**length, **headers})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self, headers: Mapping[str, str] | None = None) -> None:
        """Say that events follow; does nothing where they have begun."""
        if self.status is None:
            self.is_stream = True
            await self._start(200, {**_EVENT_HEADERS, **(headers or {})})

    async def event(self, document: object, name: str | None = None) -> None:
        """Send one event."""
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        await self.frame(f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode())

    async def frame(self, frame: bytes) -> None:
        """Send what is framed already."""
        self._heard_at = monotonic()
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})

    async def mark(self, **facts: Any) -> None:
        """Tell a front what has been said by now; nothing happens where none asks."""
        if self.resumption is not None:
            await self.begin_stream()
            await self._send({"type": "http.response.body", "body": mark_frame(facts), "more_body": True})

    async def stay_heard(self) -> None:
        """Send a comment if a stream's client has heard nothing for a while: what fronts are told does not reach it."""
        if self.is_stream and monotonic() - self._heard_at >= self._limits.ping_s:
            await self.frame(PING)

    async def end_stream(self) -> None:
        """Say that no more events follow."""
        await self.mark(is_done=True)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: as the answer, or where a stream has begun as its last event, without `[DONE]`."""
        if self.is_stream:
            await self.mark(status=error.status, headers=error.headers)
            if self.num_named is None:
                await self.event(error.body)
            else:  # in both forms: some clients look for the type, others for the error
                about = {**error.body["error"], "type": "error", "sequence_number": self.num_named}
                await self.event(about | error.body, "error")
            await self.end_stream()
        elif self.status is None and error.status in (408, 413, 415):  # what is left of the body is not waited for
            body = json.dumps(error.body, ensure_ascii=False).encode()
            headers = {"content-length": str(len(body)), "content-type": "application/json", "connection": "close"}
            await self._start(error.status, headers | error.headers)
            await self.frame(body)
            if error.status != 408:
                await forget_rest(self.request.scope, self._receive, self._limits)
            await self._send({"type": "http.response.body", "body": b""})
        elif self.status is None:
            await self.json(error.body, error.status, error.headers)

    async def disconnected(self) -> None:
        """Return when the client has gone; the body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        listed = {"x-request-id": self.id, "x-content-type-options": "nosniff", **self.more_headers, **headers}
        encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in listed.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


async def while_connected(exchange: Exchange, work: Callable[[], Awaitable[None]]) -> bool:
    """Do the work, but end it as soon as the client has gone; False where that was first."""
    working = asyncio.ensure_future(work())
    watching = asyncio.ensure_future(exchange.disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave the garbage collector out: it looks through a million new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _too_long(context: int, found: str, model: type[BaseModel]) -> ApiError:
    error = api_error(ContextLengthError.of(context, found))
    error.param = prompt_field(model)
    return error


def _refusal(error: ValidationError, document: object) -> ApiError:
    """What is wrong with a body, without repeating what it said: values stay out of answers and logs.

    A field that may have several forms has an error for each of them: the one deepest within it is meant.
    """
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    places = [_place(found["loc"], document, is_missing=found["type"] == "missing") for found in errors]
    deepest = [place for place in places if not any(place == other[: len(place)] != other for other in places)]
    number = min(range(len(errors)), key=lambda at: _rank(errors[at]["type"], places[at], deepest))
    first, place = errors[number], ".".join(map(str, places[number]))
    count = len({str(place[:1]) for place in places})
    more = f" ({count} fields have problems)" if count > 1 else ""
    where = f"{place}: " if place else ""
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}{message}{more}.", param=place[:200] or None, code=first["type"][:64])


def _rank(kind: str, place: list[int | str], deepest: list[list[int | str]]) -> tuple[bool, ...]:
    """The error that is told is the one with the least: deep, about what something is, not about another form of it."""
    return place not in deepest, place[:1] != deepest[0][:1], place[-1:] != ["type"], kind.endswith("_type")


def _place(steps: Sequence[int | str], document: object, *, is_missing: bool = False) -> list[int | str]:
    """Where in a body something is wrong: steps that name one of a field's forms, not what stands in it, are left out.

    >>> _place(("input", "list[InputItem]", 0, "role"), {"input": [{}]}, is_missing=True)
    ['input', 0, 'role']
    >>> _place(("input", "str"), {"input": 5})
    ['input']
    """
    found: list[int | str] = []
    for number, step in enumerate(steps, 1):
        is_there = isinstance(document, Mapping) and step in document
        is_there |= isinstance(document, list) and isinstance(step, int) and step < len(document)
        if is_there:
            document = cast(Any, document)[step]
        if is_there or (is_missing and number == len(steps)):
            found.append(step)
    return found


__all__ = ["DONE", "PING", "UNKNOWN_FIELDS", "ClientDisconnect", "Exchange", "while_connected"]
