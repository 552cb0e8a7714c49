"""Answers that go on when their reader has left: kept by an id, read again from their start by whoever knows it.

Owns: what an answer has sent so far, its readers, and when it is forgotten. Does not own: what it says (`answers/`).
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message

from mirrorsd.server.errors import ApiError
from mirrorsd.server.transport.exchange import PING, Exchange

UNHEARD_S = 60.0
"""So long does an answer go on, or stay, without a reader."""
_MOST_FINISHED = 16
"""Those that ended longest ago make room: an answer with all that it says of devices may take a megabyte."""


class KeptAnswer:
    """One answer: what was sent, as ASGI messages. Any number of readers follow it from its start."""

    def __init__(self, ping_s: float) -> None:
        self.is_done = False
        self.num_readers = 0
        self._ping_s = ping_s
        self._sent: list[Message] = []
        self._news = asyncio.Event()

    async def take(self, message: Message) -> None:
        """Keep what the answer sends; signs of life are for those who read now."""
        if message.get("body") != PING:
            self._sent.append(message)
            self._tell()

    def end(self) -> None:
        """Nothing more comes."""
        self.is_done = True
        self._tell()

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

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class KeptAnswers:
    """All of a server, by id."""

    def __init__(self, ping_s: float) -> None:
        self._ping_s = ping_s
        self._answers: dict[str, KeptAnswer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self, key: str, exchange: Exchange, work: Callable[[Exchange], Awaitable[None]]) -> KeptAnswer:
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
        self._tasks[key] = asyncio.ensure_future(self._run(key, kept, inner, work))
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
            ApiError: it was ended before it said anything.
        """
        kept.num_readers += 1
        if timer := self._timers.pop(key, None):
            timer.cancel()
        try:
            await kept.follow(exchange)
        finally:
            kept.num_readers -= 1
            if not kept.num_readers and self._answers.get(key) is kept:
                later = asyncio.get_running_loop().call_later
                self._timers[key] = later(UNHEARD_S, self._forget, key)
        if exchange.status is None:
            message = "The answer was ended before anything of it was said."
            raise ApiError(503, message, code="cancelled", headers={"x-should-retry": "false"})

    def cancel(self, key: str) -> bool:
        """End the answer of an id within one step; False where there is none."""
        is_there = key in self._answers
        self._forget(key)
        return is_there

    async def close(self) -> None:
        """End all."""
        tasks = list(self._tasks.values())
        for key in list(self._answers):
            self._forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, key: str, kept: KeptAnswer, inner: Exchange, work: Callable[[Exchange], Awaitable[None]]
    ) -> None:
        try:
            await work(inner)
        finally:
            kept.end()
            self._tasks.pop(key, None)
            if inner.status is None or inner.status >= 400:  # a refusal is told, and not kept
                self._answers.pop(key, None)
            finished = [name for name, one in self._answers.items() if one.is_done and not one.num_readers]
            for name in finished[:-_MOST_FINISHED]:
                self._forget(name)

    def _forget(self, key: str) -> None:
        self._answers.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if task := self._tasks.pop(key, None):
            task.cancel()


def kept_answers(exchange: Exchange) -> KeptAnswers:
    """Those of the server that an exchange belongs to."""
    found: KeptAnswers = exchange.request.app.state.kept
    return found
