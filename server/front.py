"""A front: one address before several servers. Where one dies in the middle of a text, another goes on with it.

The client's text is the one that an undisturbed server would have written. The front keeps the ids that were sent of
every text that runs; a server takes them as `continue_from` and sends what is missing. Only a server with an equal
`system_fingerprint` may do that. Which servers there are, and who gets which request, is not decided here: a front asks
one server until it fails, and any balancer of HTTP may stand behind it.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from time import monotonic
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from mirrorsd.server.errors import ApiError, not_now
from mirrorsd.server.settings import ServerSettings
from mirrorsd.server.transport.addresses import address_at, servers_of
from mirrorsd.server.transport.exchange import DONE, PING, UNKNOWN_FIELDS, ClientDisconnect, Exchange, while_connected
from mirrorsd.server.transport.guard import guarded
from mirrorsd.server.transport.resuming import FRAME_END, HEADER, Refusal, continued, frames_of, passed_back, read_mark

_log = logging.getLogger("mirrorsd.server")
_OWN_HEADERS = frozenset(
    b"host connection content-length transfer-encoding keep-alive te trailer upgrade".split()
    + b"expect accept-encoding origin referer".split()
)
"""Of a request: between two machines only, or checked by the front already."""
_PASSED_BACK = ("content-type", "retry-after", "x-should-retry", "www-authenticate", "location", UNKNOWN_FIELDS)
_JSON = {"content-type": "application/json"}
_OF_PAGES = ("content-security-policy", "cache-control", "etag", "referrer-policy", "x-frame-options")
_OF_ANSWERS = (*_PASSED_BACK, *_OF_PAGES, "allow", "cross-origin-opener-policy", "cross-origin-resource-policy")
_ANOTHER_MAY = frozenset((409, 429, 500, 502, 503, 504))
"""Answers of one server that may be otherwise at another."""
_MOST_DIFFERENT = 8
"""Servers in a row that cannot go on with a text, behind a balancer that names none of them."""
_LONGEST_PAUSE_S = 2.0


class Passage:
    """One request on its way, and what is certain of its answer: the client has it, and it can be gone on from."""

    def __init__(self, exchange: Exchange, body: bytes) -> None:
        self.exchange, self._body = exchange, body
        self.refusal: Refusal | None = None
        self.num_steps = 0
        self._known: dict[str, Any] = {}
        self._ids: list[list[int]] = []
        self._seed: int | None = None
        self._document = b""
        self._is_stream: bool | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a server has begun with the answer."""
        return bool(self._known)

    @property
    def is_text(self) -> bool:
        """Whether a text is asked for, which is worth waiting for a server that is coming."""
        return self.exchange.request.method == "POST"

    def request(self, server: httpx2.URL) -> httpx2.Request:
        """What to ask a server now: with the client's own headers, and no cookie that an answer to another one set."""
        scope = self.exchange.request.scope
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in _OWN_HEADERS and not name.startswith((b"sec-", b"proxy-"))
        ]
        own = [(HEADER.encode(), json.dumps(self._known).encode()), (b"accept-encoding", b"identity")]
        url = address_at(server, scope)
        return httpx2.Request(scope["method"], url, headers=[*headers, *own], content=self._content())

    def _content(self) -> bytes:
        """The client's body, and behind an answer's beginning what it goes on from."""
        if not self.is_begun:
            return self._body
        body = json.loads(self._body)
        if self._ids:  # behind those that the client brought along
            brought = continued(body.get("continue_from"))
            body["continue_from"] = [[*first, *ids] for first, ids in zip_longest(brought, self._ids, fillvalue=())]
        if self._seed is not None:
            body["seed"] = self._seed
        return json.dumps(body, ensure_ascii=False).encode()  # which may be no longer than a server takes

    async def pass_whole(self, answer: httpx2.Response) -> None:
        """Pass on an answer that is no text."""
        body = await answer.aread()
        names = (*_OF_ANSWERS, "content-length") if answer.request.method == "HEAD" else _OF_ANSWERS
        await self.exchange.whole(body, passed_back(answer.headers, names), answer.status_code)

    async def pass_kept(self, answer: httpx2.Response) -> None:
        """Pass on a stream that nobody can go on with: one that was kept for whoever asks for it.

        Raises:
            ApiError: it broke off.
        """
        await self.exchange.begin_stream()
        try:
            async for frame in frames_of(answer.aiter_raw()):
                if read_mark(frame) is None:
                    await self.exchange.frame(frame + FRAME_END)
        except httpx2.TransportError as error:
            message = "The server that has this answer broke off; another one has not got it. Ask for it once more."
            raise ApiError(503, message, code="answer_broken_off") from error
        await self.exchange.end_stream()

    async def follow(self, answer: httpx2.Response) -> bool:
        """Pass on a text as far as it is certain; whether all of it has come."""
        held: list[bytes] = []
        status, told = 0, dict[str, str]()
        async for frame in frames_of(answer.aiter_raw()):
            mark = read_mark(frame)
            if mark is None:
                await self._hold(held, frame, answer)
            elif "status" in mark:
                held, status, told = [], mark["status"], mark.get("headers", {})
            elif status:
                return await self._end_with(status, held, told)
            else:
                is_done = mark.pop("is_done", False)
                await self._take(mark, held, answer)
                held = []
                if is_done:
                    return await self._finish(answer)
        if held and held[-1] + FRAME_END == DONE:
            _log.error("%s: its text is whole and has no comments for a front", answer.url.netloc.decode())
            message = (
                "A text came without the comments that a front needs. Give it servers of mirrorsd, none older than "
            )
            message += "it is; what stands between them must leave comments in streams."
            raise ApiError(502, message, code="no_comments")
        return False

    async def _hold(self, held: list[bytes], frame: bytes, answer: httpx2.Response) -> None:
        if frame + FRAME_END != PING:
            held.append(frame)
        elif self._wants_stream:
            await self._begin(answer)
            await self.exchange.frame(PING)

    async def _take(self, mark: dict[str, Any], held: list[bytes], answer: httpx2.Response) -> None:
        """What was held is certain now."""
        if held and self._wants_stream:
            await self._begin(answer)
            await self.exchange.frame(FRAME_END.join(held) + FRAME_END)
        elif held:
            self._document = held[-1]
        choice, ids = mark.pop("choice", None), mark.pop("ids", [])
        self.num_steps += choice is not None
        if choice is not None:
            self._ids += [[] for _ in range(choice + 1 - len(self._ids))]
            self._ids[choice] += ids
        self._seed = mark.pop("seed", self._seed)
        self._known |= mark
        self.exchange.num_named = self._known.get("num_events")

    async def _finish(self, answer: httpx2.Response) -> bool:
        if self._wants_stream:
            await self.exchange.end_stream()
        else:
            await self.exchange.whole(_data_of(self._document), _JSON | passed_back(answer.headers, (UNKNOWN_FIELDS,)))
        return True

    async def _end_with(self, status: int, held: list[bytes], told: Mapping[str, str]) -> bool:
        """A server has ended the text with an error: another one may do better, unless the request is to blame."""
        headers = passed_back({name.lower(): value for name, value in told.items()}, _PASSED_BACK)
        self.refusal = Refusal(status, _data_of(held[-1]) if held else b"", _JSON | headers)
        if status in _ANOTHER_MAY:
            return False
        await self.fail()
        return True

    async def fail(self) -> None:
        """Tell the client that nobody goes on, and why."""
        refusal = self.refusal or Refusal(503, b"", {})
        error = refusal.error
        if self.is_begun and refusal.status in _ANOTHER_MAY:
            why = error.get("message", "none answered.")
            message = f"The server that wrote this text is gone, and no other goes on with it. The last one said: {why}"
            await self.exchange.fail(ApiError(503, message, code="text_not_continued"))
        elif self.is_begun or self.exchange.is_stream or (not refusal.body and refusal.status != 204):
            message = error.get("message", "No server answers: none could be reached, or each broke off.")
            code, param = error.get("code", "no_server"), error.get("param")
            await self.exchange.fail(ApiError(refusal.status, message, param=param, code=code))
        else:
            await self.exchange.whole(refusal.body, refusal.headers, refusal.status)

    async def _begin(self, answer: httpx2.Response) -> None:
        await self.exchange.begin_stream(passed_back(answer.headers, (UNKNOWN_FIELDS,)))

    @property
    def _wants_stream(self) -> bool:
        if self._is_stream is None:
            self._is_stream = bool(json.loads(self._body).get("stream"))
        return self._is_stream


class Front:
    """The front as an ASGI application, and as a service that is started and stopped with its server."""

    def __init__(self, servers: Sequence[str], settings: ServerSettings) -> None:
        self.servers, self.settings = servers_of(servers), settings
        self.is_closing = False
        self.failure: BaseException | None = None
        self.is_loading = False
        self._first = 0
        self._ends_at: float | None = None
        self._running: set[asyncio.Timeout] = set()
        self._client: httpx2.AsyncClient | None = None

    def use(self, client: httpx2.AsyncClient) -> None:
        """Reach servers by this client from now on: one with certificates of its own, or one that fails on purpose."""
        self._client = client

    @property
    def most_connections(self) -> int:
        """How many clients may be connected at once."""
        return self.settings.limits.connections

    async def start(self) -> None:
        """There is nothing to load."""

    def begin_to_close(self) -> None:
        """Take no more requests; those that run have `grace_s`, then they end with an error."""
        self.is_closing = True
        self._ends_at = asyncio.get_running_loop().time() + self.settings.grace_s
        for running in self._running:
            running.reschedule(self._ends_at)

    async def close(self) -> None:
        """Let go of all connections."""
        self.is_closing = True
        if self._client is not None:
            await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI has it: by whichever server answers."""
        exchange = Exchange(scope, receive, send, self.settings.limits)
        try:
            async with self._while_open():
                body = await self._read(exchange)
                if HEADER in exchange.request.headers:
                    message = "A front asks here, and this is one: give it the servers."
                    raise ApiError(400, message, code="front_behind_front")
                if self.is_closing:
                    raise not_now("closing")
                await while_connected(exchange, lambda: self._answer(Passage(exchange, body)))
        except ClientDisconnect:
            return
        except ApiError as error:
            await exchange.fail(error)

    @asynccontextmanager
    async def _while_open(self) -> AsyncIterator[None]:
        """Within it a request is read and answered, until the front's grace is over."""
        running = asyncio.timeout_at(self._ends_at)
        try:
            async with running:
                self._running.add(running)
                yield
        except TimeoutError:
            if not running.expired():
                raise
            raise not_now("closing") from None
        finally:
            self._running.discard(running)

    async def _read(self, exchange: Exchange) -> bytes:
        limits, found = self.settings.limits, bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for piece in exchange.request.stream():
                    found += piece
                    if len(found) > limits.body_bytes:
                        raise ApiError(413, f"The body has more than {limits.body_bytes} bytes.", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {limits.body_s:g} seconds.") from None
        return bytes(found)

    async def _answer(self, passage: Passage) -> None:
        """Ask one server after the other until the answer is whole, or none has brought it on for a while."""
        until, num_steps, num_different, pause_s = self._until(), -1, 0, 0.05  # the first attempt is no looking around
        while monotonic() < until:
            statuses = list[int]()
            for number in range(len(self.servers)):
                place = (self._first + number) % len(self.servers)
                said, passage.refusal = passage.refusal, None
                if await self._is_answered(passage, self.servers[place]):
                    # Neither who refuses is asked first from now on, nor who has another server's own kept answer.
                    if passage.exchange.status == 200 and not {200, 204} & {*statuses}:
                        self._first = place
                    return
                statuses.append(passage.refusal.status if passage.refusal else 0)
                if said is not None and said.status >= 400:  # who says nothing does not take it back
                    passage.refusal = passage.refusal or said
                num_different += statuses[-1] == 409
                if passage.num_steps > num_steps:
                    until, num_steps, num_different, pause_s = self._until(), passage.num_steps, 0, 0.05
            is_busy = not passage.is_begun and all(status in (409, 429) for status in statuses)
            if not passage.is_text or is_busy or num_different >= max(_MOST_DIFFERENT, 2 * len(self.servers)):
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        await passage.fail()

    def _until(self) -> float:
        return monotonic() + self.settings.limits.elsewhere_s

    async def _is_answered(self, passage: Passage, server: httpx2.URL) -> bool:
        """Whether a server has answered to the end, with what stands before it."""
        try:
            answer = await self._opened().send(passage.request(server), stream=True)
            try:
                is_whole = await self._is_passed_on(passage, answer)
            finally:
                await answer.aclose()
            if not is_whole:
                why = passage.refusal.status if passage.refusal else "it broke off"
                _log.warning("%s: %s", server, why, extra={"facts": {"request": passage.exchange.id}})
            return is_whole
        except httpx2.TransportError as error:
            why = f"{type(error).__name__} {error}".strip()
            _log.warning("%s: %s", server, why, extra={"facts": {"request": passage.exchange.id}})
            return False

    async def _is_passed_on(self, passage: Passage, answer: httpx2.Response) -> bool:
        kind = answer.headers.get("content-type", "")
        is_torn = (passage.is_begun or passage.exchange.is_stream) and not kind.startswith("text/event-stream")
        if is_torn or await _another_may(answer):
            headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
            status = answer.status_code if answer.status_code in _ANOTHER_MAY or not is_torn else 503
            passage.refusal = Refusal(status, await answer.aread(), headers)
            return False
        if not kind.startswith("text/event-stream"):
            await passage.pass_whole(answer)
        elif not passage.is_text:
            await passage.pass_kept(answer)
        else:
            return await passage.follow(answer)
        return True

    def _opened(self) -> httpx2.AsyncClient:
        """The client of this event loop's thread; it follows no redirects and reads no proxies from the environment."""
        if self._client is None:
            limits = self.settings.limits
            waits = httpx2.Timeout(limits.head_s, read=3 * limits.ping_s, pool=None)
            sizes = httpx2.Limits(max_connections=None, max_keepalive_connections=limits.connections)
            self._client = httpx2.AsyncClient(timeout=waits, limits=sizes, trust_env=False)
        return self._client


async def _another_may(answer: httpx2.Response) -> bool:
    """Whether another server may answer otherwise: kept answers are one server's own, and of an id there is one."""
    if answer.status_code == 409:
        return b'"in_use"' not in await answer.aread()
    if answer.request.method == "DELETE" and answer.status_code == 200:
        return b'"cancelled": false' in await answer.aread()
    return answer.status_code == 204 or answer.status_code in _ANOTHER_MAY


def _data_of(frame: bytes) -> bytes:
    return frame.partition(b"data: ")[2]


def build_front(servers: Sequence[str], settings: ServerSettings | None = None) -> Starlette:
    """A front as an ASGI application.

    Args:
        servers: their addresses; the first is asked until it fails. They may be the same, behind a balancer.
        settings: where it listens and who may use it; keys are checked here and by the servers.

    Raises:
        ConfigError: see `servers_of`.
    """
    front = Front(servers, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await front.close()

    app = Starlette(routes=[Mount("/", front)], middleware=guarded(front.settings), lifespan=lifespan)
    app.state.service = front
    return app
