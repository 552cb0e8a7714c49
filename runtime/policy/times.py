"""How long passes, rounds and plain steps take, learned while running, and which rows of a round are worth their time.

Every guess that is fed costs a row, and is kept only if the row before it confirms it. Where streams are often wrong
(sampling), feeding all guesses of a few branches wastes most of a round: feeding the surer guesses of many is better.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlainPace"]

_PACE_MEMORY = 0.8
"""Of the passes' slowdown, from step to step."""
_STEPS_BEFORE, _STEPS_AFTER = 16, 4
"""Plain steps that are compared with the first pass of speculation after them, and with its last ones before them."""
_LEAST_SHARE = 0.125
"""What a comparison changes at least; the first replaces what `tune` measured, the second half of that, and so on."""


class PlainPace:
    """Seconds per step of plain decoding, by the slowdown of other passes of the target.

    Attributes:
        reference: seconds per step where the target is as fast as `tune` measured it; 0: nothing was measured.
    """

    def __init__(self, reference: float = 0.0) -> None:
        self.reference = reference
        self._num_compared = 0
        self._slowdown = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS_BEFORE)

    def observe_plain(self, seconds: float) -> None:
        """Learn from a step of plain decoding beside which nothing ran."""
        self._steps.append(seconds)
        if self._slowdown and len(self._steps) == _STEPS_AFTER:
            self._compare(self._slowdown)
            self._slowdown = 0.0

    def observe_pass(self, slowdown: float) -> float:
        """Learn that a pass took `slowdown` times what `tune` measured; return what a plain step would have taken."""
        if self._steps:
            self._compare(slowdown)
            self._steps.clear()
            self._slowdown = 0.0
        self._slowdown = _PACE_MEMORY * (self._slowdown or slowdown) + (1 - _PACE_MEMORY) * slowdown
        return slowdown * self.reference

    def _compare(self, slowdown: float) -> None:
        if not self.reference:
            return
        self._num_compared += 1
        share = max(1 / self._num_compared, _LEAST_SHARE)
        self.reference += share * (median(self._steps) / slowdown - self.reference)


_RATIO_MEMORY, _PRIOR = 0.98, 5.0


class Ratio:
    """How much of something came true, over how much was expected."""

    def __init__(self, first: float = 1.0) -> None:
        self._happened, self._expected = first * _PRIOR, _PRIOR

    def observe(self, happened: float, expected: float) -> None:
        """Learn from one case."""
        self._happened = _RATIO_MEMORY * self._happened + happened
        self._expected = _RATIO_MEMORY * self._expected + expected

    @property
    def value(self) -> float:
        """1 where expectations are right."""
        return self._happened / self._expected


_TIME_MEMORY = 0.8


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
            self.seconds = _TIME_MEMORY * self.seconds + (1 - _TIME_MEMORY) * min(seconds, 2 * self.seconds)


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


class PassClock:
    """How long the target takes to some point of a pass, by number of rows."""

    def __init__(self) -> None:
        self._estimates: dict[int, Estimate] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that it took `seconds` with `num_rows` rows."""
        self._estimates.setdefault(num_rows, Estimate()).observe(seconds)

    def seconds(self, num_rows: int) -> float:
        """What it takes, by the nearest number of rows that was measured; infinite before the first.

        >>> clock = PassClock(); clock.observe(2, 0.5); clock.observe(8, 0.7)
        >>> clock.seconds(3), clock.seconds(6), PassClock().seconds(1)
        (0.5, 0.7, inf)
        """
        if not self._estimates:
            return float("inf")
        nearest = min(self._estimates, key=lambda rows: abs(rows - num_rows))
        return self._estimates[nearest].seconds or float("inf")


_FIRST_CHANCE, _CHANCE_MEMORY = 0.5, 0.97


class Confirmations:
    """How often the draft confirms its own guesses: by place in the pass, given that all before were confirmed."""

    def __init__(self, num_streams: int) -> None:
        self._chances = np.full(num_streams, _FIRST_CHANCE)

    def observe(self, num_fed: int, num_kept: int) -> None:
        """Learn from a branch of which `num_fed` guesses were fed and `num_kept` kept (the first always is).

        >>> seen = Confirmations(3); seen.observe(4, 2)
        >>> seen.chances(4).round(4).tolist()
        [1.0, 0.515, 0.2498, 0.1249]
        """
        tried = min(num_kept, num_fed - 1, len(self._chances))
        self._chances[:tried] *= _CHANCE_MEMORY
        self._chances[: min(num_kept - 1, tried)] += 1 - _CHANCE_MEMORY

    def chances(self, num_guesses: int) -> NDArray[np.float64]:
        """Chance of each of a branch's guesses to be kept, `[num_guesses]`; the first one's is 1."""
        places = np.minimum(np.arange(num_guesses - 1), len(self._chances) - 1)
        return np.concatenate([[1.0], np.cumprod(self._chances[places])])


def share_out(worths: Sequence[Sequence[float]], num_rows: int) -> list[int]:
    """How many of its rows each branch gets: the `num_rows` worthiest of all, those of a branch in their order.

    `worths[b]` are the worths of branch `b`'s rows; none is worthier than the row before it.

    >>> share_out([[8.0, 4.0, 2.0], [3.0, 1.0]], 3)
    [2, 1]
    """
    offers = sorted((-worth, branch) for branch, rows in enumerate(worths) for worth in rows)
    shares = [0] * len(worths)
    for _, branch in offers[:num_rows]:
        shares[branch] += 1
    return shares


def worth_by_rows(worths: Sequence[Sequence[float]], num_lead: int) -> NDArray[np.float64]:
    """What rounds of `0 ..` rows are worth, of which the first `num_lead` feed the chain and are worth nothing.

    >>> worth_by_rows([[8.0, 4.0], [3.0]], 1).tolist()
    [0.0, 0.0, 8.0, 12.0, 15.0]
    """
    offers = np.sort([worth for rows in worths for worth in rows])[::-1]
    return np.concatenate([np.zeros(num_lead + 1), np.cumsum(offers)])
