"""Timings of one request: who worked on what, from when to when. The loop writes, `reporting/stats` reads.

The ledger is also the clock of whoever writes to it, so that the same scheduler runs in real and in simulated time.
"""

from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

PASS_PARTS = ("prefix", "middle", "exit", "suffix")
"""How the names of a target pass's spans begin; with several exits there are `middle1`, `exit2` and so on."""


class Span(NamedTuple):
    """One piece of work: `device` is `target`, `draft` or `host`; `start` and `end` in seconds of the clock."""

    device: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start

    @property
    def is_of_pass(self) -> bool:
        """Whether the target's device computed a part of a pass in it.

        >>> Span("target", "middle1", 0, 1).is_of_pass, Span("target", "read", 0, 1).is_of_pass
        (True, False)
        """
        return self.device == "target" and self.name.startswith(PASS_PARTS)


class Ledger:
    """Append-only and safe to write from both workers (list appends are atomic).

    Attributes:
        now: the clock, in seconds; `perf_counter` unless time is simulated.
        queued_s: seconds that the scheduler waited because devices worked for other requests.
        drafted_s: seconds that it waited for the draft's work for this one.
    """

    __slots__ = ("drafted_s", "now", "queued_s", "spans")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.queued_s = self.drafted_s = 0.0
        self.spans: list[Span] = []

    def time(self, device: str, name: str) -> "Timing":
        """Record the time spent inside the `with` block."""
        return Timing(self, device, name)


class Timing:
    """A `with` block whose time goes into a ledger, also if it raises."""

    __slots__ = ("_device", "_ledger", "_name", "_start")

    def __init__(self, ledger: Ledger, device: str, name: str) -> None:
        self._ledger, self._device, self._name = ledger, device, name
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = self._ledger.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ledger.spans.append(Span(self._device, self._name, self._start, self._ledger.now()))
