"""Streams read from an event loop: on one thread of their own, cancelled and closed with their reader."""

import asyncio
import threading
import time
from collections.abc import Generator

import pytest

from mirrorsd.runtime.turns import ChunkStream, stream_in_thread


class Source:
    """Counts to ten, each number after `seconds` unless it is cancelled; remembers who asked and how it ended."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.threads: set[int] = set()
        self.closed, self.cancelled = threading.Event(), threading.Event()
        self._seconds = seconds

    def begin(self) -> ChunkStream[int]:
        return ChunkStream(self._count(), self.cancelled.set)

    def _count(self) -> Generator[int, None, None]:
        try:
            for number in range(10):
                self.threads.add(threading.get_ident())
                if self.cancelled.wait(self._seconds):
                    raise RuntimeError("cancelled")
                yield number
        finally:
            self.closed.set()


def test_items_come_in_order_from_one_other_thread() -> None:
    source = Source()

    async def read() -> list[int]:
        return [number async for number in stream_in_thread(source.begin)]

    assert asyncio.run(read()) == list(range(10))
    assert len(source.threads - {threading.get_ident()}) == len(source.threads) == 1


def test_a_task_that_is_cancelled_ends_the_item_under_way() -> None:
    source = Source(seconds=30.0)

    async def leave() -> float:
        task = asyncio.create_task(anext(stream_in_thread(source.begin)))
        await asyncio.sleep(0.05)
        started = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.perf_counter() - started

    assert asyncio.run(leave()) < 5.0
    assert source.closed.wait(5.0)


def test_a_generator_that_is_closed_closes_its_stream() -> None:
    source = Source()

    async def read_one() -> int:
        stream = stream_in_thread(source.begin)
        first = await anext(stream)
        await stream.aclose()
        return first

    assert asyncio.run(read_one()) == 0
    assert source.closed.wait(5.0)


def test_what_the_stream_raises_is_raised_to_the_reader() -> None:
    def begin() -> ChunkStream[int]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(anext(stream_in_thread(begin)))
