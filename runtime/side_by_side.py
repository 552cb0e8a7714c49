"""Several texts at once, by sessions that share passes; they are read one after another, in their order.

Owns: who writes which text, and the threads of texts that nobody reads yet. Does not own: sessions and their passes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from mirrorsd.runtime.reporting.results import Chunk

Writer = TypeVar("Writer")


class Stream(Iterator[Chunk], Protocol):
    """A text's chunks; closing it, from any thread, stops the text."""

    def close(self) -> None:
        """Stop."""


Begin = Callable[[Writer], Stream]
Borrow = Callable[[int], Sequence[AbstractContextManager[Writer]]]


def side_by_side(
    own: Writer, texts: Sequence["Begin[Writer]"], borrow: "Borrow[Writer]", goes_on: Callable[[], bool] = lambda: True
) -> Iterator[tuple[int, Chunk]]:
    """Chunks of all texts with the text's number: those of the first, then those of the second, and so on.

    Args:
        own: who writes the first text, and whatever nobody else has begun once its turn to be read comes.
        texts: begin each.
        borrow: asked, after the first chunk of what `own` writes, for others who can write so many texts at once.
            They are given back when no text is left, or the reading ends.
        goes_on: asked before each text but its first that one of them writes: whether it is not needed elsewhere.
    """
    writing = _Writing(texts, goes_on)
    try:
        for number in range(len(texts)):
            if not writing.takes(number):
                yield from ((number, chunk) for chunk in writing.read(number))
                continue
            stream, is_first = texts[number](own), True
            try:
                for chunk in stream:
                    yield number, chunk
                    if is_first:
                        writing.begin(borrow)
                        is_first = False
            finally:
                stream.close()
    finally:
        writing.end()


class _Writing(Generic[Writer]):
    """Texts that are written on threads of their own, each by the first who is free."""

    def __init__(self, texts: Sequence["Begin[Writer]"], goes_on: Callable[[], bool]) -> None:
        self._texts, self._left, self._goes_on = texts, set(range(len(texts))), goes_on
        self._written: list[SimpleQueue[Chunk | BaseException | None]] = [SimpleQueue() for _ in texts]
        self._running: set[Stream] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_ended = False

    def takes(self, number: int) -> bool:
        """Have the caller write a text, unless somebody has begun it."""
        with self._lock:
            is_left = number in self._left
            self._left.discard(number)
            return is_left

    def begin(self, borrow: "Borrow[Writer]") -> None:
        """Have as many as can be borrowed write what is left, once."""
        if self._left and not self._threads:
            places = borrow(len(self._left))
            with suppress(RuntimeError):  # the system has no more threads: who reads writes what is left
                for place in places:
                    thread = threading.Thread(target=self._write, args=(place,), daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def read(self, number: int) -> Iterator[Chunk]:
        """What is written of a text, as it comes.

        Raises:
            BaseException: what its session raised.
        """
        while (found := self._written[number].get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def end(self) -> None:
        """Stop what is still written, and wait for that."""
        with self._lock:
            self._is_ended = True
            self._left.clear()
            running = list(self._running)
        for stream in running:
            stream.close()
        for thread in self._threads:
            thread.join()

    def _write(self, place: AbstractContextManager[Writer]) -> None:
        with place as writer:
            while (number := self._next()) is not None:
                end: BaseException | None = None
                try:
                    self._write_one(number, writer)
                except BaseException as error:  # told to whoever reads that text, who then reads none of the rest
                    end = error
                    with self._lock:
                        self._left.clear()
                self._written[number].put(end)
                if not self._goes_on():
                    return

    def _next(self) -> int | None:
        with self._lock:
            number = min(self._left, default=None)
            self._left.discard(-1 if number is None else number)
            return number

    def _write_one(self, number: int, writer: Writer) -> None:
        stream = self._texts[number](writer)
        with self._lock:
            self._running.add(stream)
            if self._is_ended:
                stream.close()
        try:
            for chunk in stream:
                self._written[number].put(chunk)
        finally:
            with self._lock:
                self._running.discard(stream)
            stream.close()
