"""Times: who worked on what for a request, from when to when; and what was seen lately. Nothing here decides.

Running means of what things take, and of how often guesses are right. The loop writes the ledger, `reporting/stats`
reads it.
The ledger is also the clock of whoever writes to it, so that the same scheduler runs in real and in simulated time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf, log
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PASS_PARTS = ("prefix", "middle", "exit", "suffix")
"""How the names of a target pass's spans begin; with several exits there are `middle1`, `exit2` and so on."""

TIME_MEMORY = 0.8
"""Of seconds, per measurement. 0.6: 0.98 to 1.01. 0.9: 0.95 to 1.01."""
_STEPS = 16
"""Plain steps that are compared with the first pass of speculation after them; a quarter of them with its last ones
before them. 8 and 32: 1.00 (`bench/studies/constants.py`)."""
_FIRST_RATE, RATE_MEMORY = 0.6, 0.95
"""Of the acceptance rate: where it begins, and what it keeps per token. Speeds as in `windows`: beginning at 0.3, 0.98
to 1.02, at 0.9, 0.95 to 1.02; keeping 0.8, 0.96 to 1.03."""


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
        pass_ends: when the target's pass will end, where time is simulated and so it is known.
        prefilled: when the target had read the prompt, in seconds of the clock: where the speed's starts.
    """

    __slots__ = ("drafted_s", "now", "pass_ends", "prefilled", "queued_s", "spans")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.queued_s = self.drafted_s = self.prefilled = 0.0
        self.pass_ends = inf
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


class Estimate:
    """A running mean of seconds that follows the machine; None until something was measured.

    A measurement counts at most double: a machine that slept in between must not stop the draft for good.

    >>> estimate = Estimate(); estimate.observe(1.0); estimate.observe(60.0)
    >>> estimate.seconds
    1.2
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def observe(self, seconds: float) -> None:
        """Learn from one measurement."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            self.seconds = TIME_MEMORY * self.seconds + (1 - TIME_MEMORY) * min(seconds, 2 * self.seconds)


class RoundClock:
    """Round times by size. A round costs what the smallest compiled size that holds its rows costs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._estimates = {size: Estimate() for size in sorted(sizes)}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that a round of `num_rows` rows took `seconds`."""
        for size, estimate in self._estimates.items():
            if size >= num_rows:
                estimate.observe(seconds)
                return

    @property
    def shortest_seconds(self) -> float:
        """What the smallest round takes; 0 until it was measured."""
        return next(iter(self._estimates.values())).seconds or 0.0

    def best_rows(self, worth_by_rows: NDArray[np.float64], seconds: float) -> int:
        """Rows of the round that is worth most for its time, of those that should be over within `seconds`; 0 if none.

        A size that was never measured is taken where there is one: that is how it gets measured.

        Args:
            worth_by_rows: `[rows + 1]` what rounds of `0 ..` rows are worth; rounds of more are worth the last.
            seconds: what is left.

        With rounds of 4 rows in 1 ms and of 8 in 1.5 ms, 8 rows are taken if the second four are worth more than half
        of the first four:

        >>> clock = RoundClock([4, 8, 16])
        >>> clock.observe(4, 0.001); clock.observe(8, 0.0015); clock.observe(16, 10.0)
        >>> clock.best_rows(np.array([0, 1, 2, 3, 4, 4.5, 5, 5.5, 6.5]), 1.0)
        8
        >>> clock.best_rows(np.array([0, 1, 2, 3, 4, 4.5]), 1.0), clock.best_rows(np.array([0, 1]), 0.0)
        (4, 0)
        """
        best, best_rate = 0, 0.0
        for size, estimate in self._estimates.items():
            worth = float(worth_by_rows[min(size, len(worth_by_rows) - 1)])
            if estimate.seconds is None:
                best, best_rate = (size, float("inf")) if worth else (best, best_rate)
            elif estimate.seconds <= seconds and (rate := worth / max(estimate.seconds, 1e-9)) > best_rate:
                best, best_rate = size, rate
        return best


class PlainPace:
    """Seconds per step of plain decoding, by the slowdown of other passes of the target.

    Attributes:
        reference: seconds per step where the target is as fast as `tune` measured it; 0: nothing was measured.
    """

    def __init__(self, reference: float = 0.0) -> None:
        self.reference = reference
        self._num_compared = 0
        self._slowdown = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def observe_plain(self, seconds: float) -> None:
        """Learn from a step of plain decoding beside which nothing ran."""
        self._steps.append(seconds)
        if self._slowdown and len(self._steps) == _STEPS // 4:
            self._compare(self._slowdown)
            self._slowdown = 0.0

    def observe_pass(self, slowdown: float) -> float:
        """Learn that a pass took `slowdown` times what `tune` measured; return what a plain step would have taken."""
        if self._steps:
            self._compare(slowdown)
            self._steps.clear()
            self._slowdown = 0.0
        self._slowdown = TIME_MEMORY * (self._slowdown or slowdown) + (1 - TIME_MEMORY) * slowdown
        return slowdown * self.reference

    def _compare(self, slowdown: float) -> None:
        if not self.reference:
            return
        self._num_compared += 1
        share = max(1 / self._num_compared, 1 - TIME_MEMORY)
        self.reference += share * (median(self._steps) / slowdown - self.reference)


class AcceptanceRate:
    """How often a guess is right, lately: the share of tried window tokens that were accepted."""

    def __init__(self) -> None:
        self.value = _FIRST_RATE

    def observe(self, num_window: int, num_accepted: int) -> None:
        """Learn from a verified window: accepted tokens were right, the next one (if any) was wrong."""
        for row in range(min(num_accepted + 1, num_window)):
            self.value = RATE_MEMORY * self.value + (1 - RATE_MEMORY) * (row < num_accepted)

    @property
    def log_odds(self) -> float:
        """Those of the rate; so few tokens tell it from never or always by half of one's share at most.

        >>> rate = AcceptanceRate(); rate.observe(300, 300); round(rate.log_odds, 2)
        3.66
        """
        least = (1 - RATE_MEMORY) / 2
        rate = min(max(self.value, least), 1 - least)
        return log(rate / (1 - rate))
