"""Whose turn it is on a session's caches: one request at a time, and nobody waits for one that has gone away.

On a stream it is one reader's at a time. An event loop reads it on a thread of its own.

Owns: the order of a session's requests, and what becomes of a stream that nobody reads on. Does not own: the caches
(`decoding/seat`), the steps (`decoding/step`).
"""

import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_ident
from time import perf_counter
from typing import Protocol, TypeVar

from mirrorsd.graphs.errors import GenerationError

Item = TypeVar("Item")
GRACE_S = 0.25
"""A stream that was read this lately is probably still being read: others wait so long before they take its turn.
Whoever has taken a seat for a prompt begins to read it within that, or is not waited for."""
LOOK_S = 0.05
"""Seconds between two looks of those who wait, whether they are still wanted."""


class TurnTaker(Protocol):
    """A request's place in the order."""

    def raise_if_unwanted(self) -> None:
        """Raise why it should not wait any longer, if so."""

    def leave(self) -> None:
        """Another request takes the caches over: leave nothing running on them."""


class Turns:
    """Hands the caches from request to request, step by step.

    A request keeps its turn from its first step to its end; others wait in the order they came. Between two steps of a
    stream, though, its reader may never come back. Whoever waits then takes the turn: at once on the thread that read
    the stream, else after `GRACE_S`. The stream may go on later, once it has its turn again.

    Attributes:
        is_closed: whether nobody is given a turn any more.
    """

    def __init__(self) -> None:
        # A Ctrl-C may fall between any two lines of Python, those of `threading.Condition.__enter__` too: what stands
        # behind `with` must be a lock that is written in C.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[TurnTaker] = deque()
        self._holder: TurnTaker | None = None
        self._thread = 0
        self._left_at: float | None = None
        self.is_closed = False

    @property
    def is_taken(self) -> bool:
        """Whether somebody has the turn: who would wait for it has to wait, perhaps for a whole text."""
        return self._holder is not None

    def take(self, taker: TurnTaker) -> bool:
        """Wait for the caches, until `pause`; True if nobody has had them since this taker's last turn.

        Raises:
            GenerationError: the session is closed, or another thread is reading the same stream.
        """
        with self._lock:
            is_unchanged = self._holder is taker
            if is_unchanged and self._is_stepping_elsewhere():
                raise GenerationError("Another thread is reading this stream: one thread at a time may do that.")
            if not is_unchanged:
                self._line_up(taker)
            self._check(taker)
            if not is_unchanged and self._holder is not None:
                self._holder.leave()
            self._holder, self._left_at, self._thread = taker, None, threading.get_ident()
            return is_unchanged

    def check(self, taker: TurnTaker) -> None:
        """Refuse to go on where the turn was taken away in the middle of a step, as a signal handler might.

        Raises:
            GenerationError: it was, by another request or because the session is closed.
        """
        if self._holder is not taker:
            self._check(taker)
            raise GenerationError("Another request was started on this session in the middle of a step.")

    def pause(self, taker: TurnTaker) -> None:
        """The step is over: others may have a turn, if this taker does not come back soon."""
        with self._lock:
            if self._holder is taker:
                self._left_at = perf_counter()
            self._changed.notify_all()

    def retire(self, taker: TurnTaker) -> None:
        """Give the turn up for good."""
        with self._lock:
            if self._holder is taker:
                self._holder, self._left_at = None, None
                taker.leave()
            self._stop_waiting(taker)

    def end_unwanted(self, terminate: Callable[[], None]) -> None:
        """Let those who wait look again whether they still want to; `terminate` the pass of who has the turn unwanted.

        Nobody's turn begins meanwhile, whose pass it might end.
        """
        with self._lock:
            self._changed.notify_all()
            try:
                if self._holder is not None:
                    self._holder.raise_if_unwanted()
            except GenerationError:
                terminate()

    def close(self) -> None:
        """Let nobody have a turn any more. A step that is under way goes on to its end; see `wait_until_free`."""
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    def wait_until_free(self, timeout_s: float) -> bool:
        """Wait until no step is under way on another thread, and take the turn from a stream between two steps."""
        with self._lock:
            is_free = self._changed.wait_for(lambda: not self._is_stepping_elsewhere(), timeout_s)
            if is_free and self._holder is not None:
                holder, self._holder = self._holder, None
                holder.leave()
            return is_free

    def _line_up(self, taker: TurnTaker) -> None:
        try:
            self._queue.append(taker)
            while self._queue[0] is not taker or self._seconds_to_wait() > 0:
                self._check(taker)
                self._changed.wait(min(self._seconds_to_wait(), LOOK_S) or LOOK_S)
        finally:
            self._stop_waiting(taker)

    def _stop_waiting(self, taker: TurnTaker) -> None:
        with suppress(ValueError):  # it waits no more
            self._queue.remove(taker)
        self._changed.notify_all()

    def _seconds_to_wait(self) -> float:
        """Until the holder's turn may be taken; infinite while it is at a step."""
        if self._holder is None or self._thread == threading.get_ident():
            return 0.0
        if self._left_at is None:
            return float("inf")
        return max(0.0, self._left_at + GRACE_S - perf_counter())

    def _is_stepping_elsewhere(self) -> bool:
        is_stepping = self._holder is not None and self._left_at is None
        return is_stepping and self._thread != threading.get_ident()

    def _check(self, taker: TurnTaker) -> None:
        taker.raise_if_unwanted()
        if self.is_closed:
            raise GenerationError("This session is closed: load the bundle again, or open a new session.")


class CacheTaker(TurnTaker):
    """Has a session's turn to read or write its caches."""

    def raise_if_unwanted(self) -> None:
        """It waits for as long as it takes."""

    def leave(self) -> None:
        """Nothing runs on the caches."""


class ChunkStream(Iterator[Item]):
    """A text's chunks, for one reader at a time; closing it, from any thread, stops the text.

    Attributes:
        cancel: stops the text, too; its chunk under way ends early.
    """

    def __init__(self, chunks: Generator[Item, None, None], cancel: Callable[[], None]) -> None:
        self._chunks, self.cancel = chunks, cancel
        self._reader = 0

    def __next__(self) -> Item:
        """The next chunk.

        Raises:
            GenerationError: another thread waits for it, or the call that a signal handler has interrupted.
            Cancelled: the text was stopped; and what `MirrorSession.generate` raises.
        """
        reader, self._reader = self._reader, self._reader or get_ident()
        try:
            return next(self._chunks)
        except ValueError as error:
            if not _is_of_generator(error):
                raise
            who = "A call that this one interrupts" if reader == get_ident() else "Another thread"
            raise GenerationError(f"{who} is reading this stream: one thread at a time may do that.") from None
        finally:
            self._reader = reader

    def close(self) -> None:
        """Stop the text; one that is being read by another thread ends there with `Cancelled`, within a step."""
        try:
            self._chunks.close()
        except ValueError as error:
            if not _is_of_generator(error):
                raise
            self.cancel()


def _is_of_generator(error: ValueError) -> bool:
    """Whether Python says it of a generator that is at work, and not something within the generator."""
    return str(error) == "generator already executing"


async def stream_in_thread(begin: Callable[[], ChunkStream[Item]]) -> AsyncGenerator[Item, None]:
    """Begin a stream and read it chunk by chunk, when asked to, on one thread that ends with it.

    Where this generator is closed or its task cancelled in the middle of a chunk, the text is cancelled. Then the
    stream is closed on its own thread.
    """
    import asyncio  # 30 ms of every start, for those who stream in an event loop alone

    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirrorsd-stream")
    try:
        stream = await loop.run_in_executor(thread, begin)
        try:
            while (item := await loop.run_in_executor(thread, next, stream, None)) is not None:
                yield item
        finally:
            stream.cancel()
            thread.submit(stream.close)
    finally:
        thread.shutdown(wait=False)
