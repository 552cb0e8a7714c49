"""An iterator that runs on a thread, read by a coroutine: bounded between the two, and ended from either side."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import Generic, TypeVar

Item = TypeVar("Item")
_MOST_WAITING = 32
_LOOK_S = 0.25


class Threaded(Generic[Item]):
    """What `make()` yields on a thread of `executor`.

    A reader that is slow holds the thread up once 32 items wait for it. `cancel` is asked for when the reader goes
    away; the iterator is then closed on its own thread, and `finished` is set once that is done.
    """

    def __init__(self, executor: Executor, make: Callable[[], Iterator[Item]], cancel: Callable[[], None]) -> None:
        self._make, self._cancel = make, cancel
        self._items: deque[Item] = deque()
        self._space = threading.Semaphore(_MOST_WAITING)
        self._is_left = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._future = executor.submit(self._run)
        self._ended: asyncio.Future[None] = asyncio.wrap_future(self._future)
        self._ended.add_done_callback(lambda _: self._changed.set())

    def _run(self) -> None:
        iterator = self._make()
        try:
            for item in iterator:
                while not self._space.acquire(timeout=_LOOK_S):
                    if self._is_left.is_set():
                        return
                if self._is_left.is_set():
                    return
                self._loop.call_soon_threadsafe(self._arrive, item)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _arrive(self, item: Item) -> None:
        self._items.append(item)
        self._changed.set()

    async def items(self, ping_s: float) -> AsyncIterator[Item | None]:
        """The items, and None whenever nothing has come for `ping_s`; raises what the iterator raised."""
        while True:
            while self._items:
                self._space.release()
                yield self._items.popleft()
            if self._ended.done():
                if self._items:
                    continue
                self._ended.result()
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(ping_s):
                    await self._changed.wait()
            except TimeoutError:
                yield None

    def leave(self) -> None:
        """Nobody reads on: cancel what runs, take away what has not begun."""
        self._is_left.set()
        self._cancel()
        self._future.cancel()
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()
        else:
            self._ended.add_done_callback(lambda future: future.cancelled() or future.exception())
