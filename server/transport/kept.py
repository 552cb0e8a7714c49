"""Answers that go on when their reader has left: kept by an id, read again from their start by whoever knows it.

Owns: what an answer has sent so far, its readers, and when it is forgotten. Does not own: what it says (`answers/`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import Message

from mirrorsd.server.errors import ApiError, internal_error
from mirrorsd.server.transport.exchange import PING, Exchange
from mirrorsd.server.transport.resuming import FRAME_END

_log = logging.getLogger("mirrorsd.server")
UNHEARD_S = 60.0
"""So long does an answer go on, or stay, without a reader."""
MOST_BYTES = 16 << 20
"""Of what has ended and is read by nobody; what ended longest ago makes room. With all that it says of devices, a text
may take megabytes."""
Work = Callable[[Exchange], Awaitable[None]]


class KeptAnswer:
    """One answer: what was sent, as ASGI messages. Any number of readers follow it from its start.

    Attributes:
        is_done: whether nothing more comes.
        is_unwanted: whether somebody who knows its id has ended it.
        num_readers: of those who follow it now.
        num_bytes: of what was sent.
        task: writes it.
        timer: forgets it, where nobody reads it.
    """

    def __init__(self, ping_s: float) -> None:
        self.is_done = self.is_unwanted = False
        self.num_readers = self.num_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._ping_s = ping_s
        self._sent: list[Message] = []
        self._news = asyncio.Event()

    async def take(self, message: Message) -> None:
        """Keep what the answer sends; signs of life are for those who read now."""
        if message.get("body") != PING:
            self._sent.append(message)
            self.num_bytes += len(message.get("body", b""))
            self._tell()

    async def write(self, inner: Exchange, work: Work) -> None:
        """Have `work` answer; whatever becomes of it, its readers are told the end."""
        error: ApiError | None = None
        try:
            await work(inner)
        except asyncio.CancelledError:
            error = _cancelled(self)
            raise
        except Exception as failure:
            error = internal_error()
            _log.error("a kept answer failed", exc_info=failure, extra={"facts": {"request": inner.id}})
        finally:
            if error is not None and not self._is_whole:
                await inner.fail(error)
            self.end()

    def end(self) -> None:
        """Nothing more comes."""
        self.is_done = True
        self._tell()

    @property
    def is_refusal(self) -> bool:
        """Whether a stream that began with signs of life, while a bundle was loaded, had nothing but an error."""
        frames = b"".join(message.get("body", b"") for message in self._sent).split(FRAME_END)
        said = [frame for frame in frames if frame and not frame.startswith(b":")]
        return len(said) == 1 and b'"error"' in said[0]

    @property
    def _is_whole(self) -> bool:
        return bool(self._sent) and not self._sent[-1].get("more_body", self._sent[-1]["type"] == "http.response.start")

    async def follow(self, exchange: Exchange) -> None:
        """Send everything so far and then what comes, until the answer ends."""
        place = 0
        while True:
            while place < len(self._sent):
                await exchange.relay(self._sent[place])
                place += 1
            if self.is_done:
                return
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), self._ping_s)
            except TimeoutError:
                if exchange.status is not None:
                    await exchange.frame(PING)

    def stop(self) -> None:
        """End it within one step, if it still goes on."""
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            self.task.cancel()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class KeptAnswers:
    """All of a server, by id; those that ended longest ago stand before others that have ended."""

    def __init__(self, ping_s: float) -> None:
        self._ping_s = ping_s
        self._answers: dict[str, KeptAnswer] = {}

    def begin(self, key: str, exchange: Exchange, work: Work) -> KeptAnswer:
        """Have `work` answer into a new kept answer, whoever stays to read it.

        Raises:
            ApiError: there is one of this id.
        """
        if key in self._answers:
            raise ApiError(
                409, "mirror_keep: an answer of this id is kept already.", param="mirror_keep", code="in_use"
            )
        kept = self._answers[key] = KeptAnswer(self._ping_s)
        inner = exchange.recorded(kept.take)
        kept.task = asyncio.ensure_future(kept.write(inner, work))
        kept.task.add_done_callback(lambda _: self._end(key, kept, inner.status))
        return kept

    async def read(self, key: str, exchange: Exchange) -> bool:
        """Follow the answer of an id; False where there is none.

        Raises:
            ApiError: see `follow`.
        """
        kept = self._answers.get(key)
        if kept is not None:
            await self.follow(key, kept, exchange)
        return kept is not None

    async def follow(self, key: str, kept: KeptAnswer, exchange: Exchange) -> None:
        """Follow an answer, kept or over by now; one that is kept is forgotten after a while without readers.

        Raises:
            ApiError: it was ended before it began.
        """
        kept.num_readers += 1
        if kept.timer is not None:
            kept.timer.cancel()
        try:
            await kept.follow(exchange)
        finally:
            kept.num_readers -= 1
            if not kept.num_readers and self._answers.get(key) is kept:
                kept.timer = asyncio.get_running_loop().call_later(UNHEARD_S, self._forget, key)
                self._make_room()
        if exchange.status is None:
            raise _cancelled(kept)

    def cancel(self, key: str) -> bool:
        """End the answer of an id within one step; False where there is none."""
        kept = self._answers.get(key)
        if kept is not None:
            kept.is_unwanted = True
            self._forget(key)
        return kept is not None

    async def close(self) -> None:
        """End all."""
        tasks = [kept.task for kept in self._answers.values() if kept.task is not None]
        for key in list(self._answers):
            self._forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, key: str, kept: KeptAnswer, status: int | None) -> None:
        kept.end()  # one that is ended before it has begun does not do so itself
        if self._answers.get(key) is not kept:  # forgotten; another one may have the id by now
            return
        if status is None or status >= 400 or kept.is_refusal:  # a refusal is told, and not kept
            self._forget(key)
        else:
            self._answers[key] = self._answers.pop(key)
            self._make_room()

    def _make_room(self) -> None:
        """Forget what ended longest ago."""
        unread = {key: kept for key, kept in self._answers.items() if kept.is_done and not kept.num_readers}
        num_bytes = sum(kept.num_bytes for kept in unread.values())
        for key, kept in unread.items():
            if num_bytes > MOST_BYTES:
                num_bytes -= kept.num_bytes
                self._forget(key)

    def _forget(self, key: str) -> None:
        self._answers.pop(key).stop()


def _cancelled(kept: KeptAnswer) -> ApiError:
    """What readers of an answer that is ended are told: no front has another server go on where that was asked for."""
    if kept.is_unwanted:
        return ApiError(410, "The answer was ended by its id.", code="cancelled")
    return ApiError(503, "The answer was ended.", code="cancelled", headers={"x-should-retry": "false"})


def kept_answers(exchange: Exchange) -> KeptAnswers:
    """Those of the server that an exchange belongs to."""
    found: KeptAnswers = exchange.request.app.state.kept
    return found
