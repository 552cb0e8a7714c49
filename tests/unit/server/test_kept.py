"""Kept answers: their readers are told how they end, an id is that of one answer, and the memory of all is bounded."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.transport import kept as kept_answers
from mirrorsd.server.transport.exchange import PING, Exchange
from mirrorsd.server.transport.kept import KeptAnswers

Work = Callable[[Exchange], Awaitable[None]]


class Reader:
    """An exchange, and what was sent into it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.exchange = Exchange({"type": "http", "headers": []}, self._receive, self._send, Limits())

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def has_end(self) -> bool:
        return self.sent[-1]["type"] == "http.response.body" and not self.sent[-1].get("more_body")

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def begun(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event("a beginning")


async def endless(exchange: Exchange) -> None:
    await begun(exchange)
    await asyncio.Event().wait()


async def failing(exchange: Exchange) -> None:
    await begun(exchange)
    raise RuntimeError("a fault of ours")


def of_bytes(size: int) -> Work:
    async def work(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.frame(bytes(size))
        await exchange.end_stream()

    return work


async def few_rounds() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["cancel", "close", "fails"])
def test_readers_are_told_that_it_was_ended(way: str) -> None:
    async def run() -> Reader:
        answers, reader = KeptAnswers(60), Reader()
        kept = answers.begin("key", reader.exchange, failing if way == "fails" else endless)
        following = asyncio.create_task(answers.follow("key", kept, reader.exchange))
        await few_rounds()
        if way == "close":
            await answers.close()
        elif way == "cancel":
            assert answers.cancel("key")
        await asyncio.wait_for(following, 60)
        return reader

    reader = asyncio.run(run())
    assert reader.has_end
    assert (b'"internal_error"' if way == "fails" else b'"cancelled"') in reader.text.split(b"data: ")[-1]


def test_one_that_is_ended_before_its_first_step_is_an_error() -> None:
    async def run() -> None:
        answers, reader = KeptAnswers(60), Reader()
        kept = answers.begin("key", reader.exchange, endless)
        answers.cancel("key")
        with pytest.raises(ApiError, match="ended"):
            await asyncio.wait_for(answers.follow("key", kept, reader.exchange), 60)

    asyncio.run(run())


@pytest.mark.parametrize("work", [endless, None])
def test_the_end_of_one_is_not_that_of_another_with_its_id(work: Work | None) -> None:
    async def silent(_: Exchange) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        answers, reader = KeptAnswers(60), Reader()
        answers.begin("key", reader.exchange, work or silent)
        await few_rounds()
        answers.cancel("key")
        other = answers.begin("key", Reader().exchange, endless)
        await few_rounds()
        assert not other.is_done
        assert answers.cancel("key"), "it is still found"
        await few_rounds()
        assert other.is_done

    asyncio.run(run())


def test_a_refusal_behind_signs_of_life_is_told_and_not_kept() -> None:
    """A bundle was loaded before anybody saw that the prompt is too long: the next try has the same id."""

    async def refused(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.frame(PING)
        await exchange.fail(ApiError(400, "too long", code="context_length_exceeded"))

    async def run() -> None:
        answers, reader = KeptAnswers(60), Reader()
        kept = answers.begin("key", Reader().exchange, refused)
        await answers.follow("key", kept, reader.exchange)
        assert b"context_length_exceeded" in reader.text and reader.has_end
        await few_rounds()
        answers.begin("key", Reader().exchange, endless)
        await answers.close()

    asyncio.run(run())


def test_what_ended_longest_ago_makes_room_for_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MOST_BYTES", 1000)

    async def there(answers: KeptAnswers, key: str) -> bool:
        return await answers.read(key, Reader().exchange)

    async def run() -> None:
        answers, goes_on, held = KeptAnswers(60), asyncio.Event(), Reader()

        async def late(exchange: Exchange) -> None:
            await goes_on.wait()
            await of_bytes(400)(exchange)

        answers.begin("last", held.exchange, late)
        for key in ("first", "second"):
            kept = answers.begin(key, held.exchange, of_bytes(400))
            await answers.follow(key, kept, Reader().exchange)
        for number in range(40):
            answers.begin(f"small {number}", held.exchange, of_bytes(1))
        await few_rounds()
        assert await there(answers, "first") and await there(answers, "second") and await there(answers, "small 0")
        goes_on.set()
        await few_rounds()
        assert not await there(answers, "first")
        assert await there(answers, "second") and await there(answers, "last") and await there(answers, "small 39")
        await answers.close()

    asyncio.run(run())


def test_headers_that_are_added_for_one_reader_are_not_the_next_ones() -> None:
    """As pages of allowed origins get them, by middleware that changes the message on its way."""

    async def run() -> None:
        answers, first, second = KeptAnswers(60), Reader(), Reader()
        kept = answers.begin("key", first.exchange, of_bytes(1))
        await answers.follow("key", kept, first.exchange)
        first.sent[0]["headers"].append((b"access-control-allow-origin", b"https://a.example"))
        first.sent[0]["more"] = True
        assert await answers.read("key", second.exchange)
        assert "more" not in second.sent[0]
        assert b"access-control-allow-origin" not in dict(second.sent[0]["headers"])
        await answers.close()

    asyncio.run(run())
