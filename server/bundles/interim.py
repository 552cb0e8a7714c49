"""Stands in for the engine's own seats until they are there."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mirrorsd.runtime import MirrorPipeline, MirrorSession


class Seats:
    def __init__(self, pipe: MirrorPipeline, count: int) -> None:
        self.num_seats = count
        self._free = [(pipe.session(), []) for _ in range(count)]
        self._lock = threading.Lock()
        self.bytes_per_seat = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @contextmanager
    def take(self, token_ids: Sequence[int], timeout_s: float | None = None) -> Iterator[MirrorSession]:
        with self._lock:
            session, ids = self._free.pop()
        try:
            yield session
        finally:
            with self._lock:
                self._free.append((session, list(token_ids)))

    def close(self) -> None:
        for session, _ in self._free:
            session.close()
