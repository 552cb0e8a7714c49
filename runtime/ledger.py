"""Timings of one request: who worked on what, from when to when. The loop writes, `generation_stats` reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple


class Span(NamedTuple):
    """One piece of work: `device` is `target`, `draft` or `host`; `start` and `end` in seconds of `perf_counter`."""

    device: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


class Ledger:
    """Append-only and safe to write from both workers (list appends are atomic)."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def time(self, device: str, name: str) -> Iterator[None]:
        """Record the time spent inside the `with` block."""
        start = perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(device, name, start, perf_counter()))
