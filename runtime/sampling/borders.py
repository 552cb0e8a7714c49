"""Whether a candidate stands before the border of top-p: less than `top_p` of the mass before it.

Masses are sums of float32 exponentials; every method reads them from `WeighedBorder`, so all keep the same tokens. Of a
flat row `CountedBorder` says the same without them, wherever it is beyond any rounding.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import neg
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.shortlist import ShortlistFilter

FEW = 16_384
"""Tokens of which a sum costs next to nothing."""
_COLUMNS, _PARTS = 128, 4
_ROUGH = 1e-3
"""Of a mass: far more than single precision loses in a sum."""
_MOST_LEVELS = 20
"""So many counts cost what the exponentials do."""


class Border(Protocol):
    """What top-p keeps of candidates."""

    def is_behind(self, place: int) -> bool:
        """Whether the candidate at this place is kept: the border is behind it."""
        ...


class WeighedBorder(NamedTuple):
    """Of candidates `[n]` whose weights are known.

    Attributes:
        logits: before the temperature.
        weights: float32, probabilities relative to the best.
        parts: places, and the sum of their weights.
        kept_mass: kept is before what less than this of the weights stands.
        scratch: float32, at least as long as a part.
    """

    logits: NDArray[np.floating]
    weights: NDArray[np.float32]
    parts: list[tuple[slice, float]]
    kept_mass: float
    scratch: NDArray[np.float32]

    def is_behind(self, place: int) -> bool:
        """Sum what stands before the candidate.

        After some parts of the row, at least what stands before in them does so, and at most that and all of the rest.
        Of a flat row one part mostly says which it is, beyond any rounding.
        """
        at = self.logits[place]
        before = float(self.weights[place]) * int(np.count_nonzero(self.logits[:place] == at))
        rest = sum(mass for _, mass in self.parts)
        near = _ROUGH * rest
        for part, mass in self.parts:
            is_above = self.logits[part] > at
            above = self.scratch[: len(is_above)]
            above[:] = is_above
            above *= self.weights[part]
            before += total(above)
            rest -= mass
            if before > self.kept_mass + near:
                return False
            if before + rest < self.kept_mass - near:
                return True
        return before < self.kept_mass


class CountedBorder:
    """Of all tokens of a flat row `[V]`, by counting how many stand above a few levels of logits.

    A token between two levels weighs at least what the lower one says and at most what the upper one does. The level
    that is missing most is added until that decides. Where it does not, the row is weighed.
    """

    def __init__(
        self,
        logits: NDArray[np.floating],
        best: float,
        filters: ShortlistFilter,
        scratch: NDArray[np.float32],
        weigh: Callable[[], Border],
    ) -> None:
        """Take a row, its best logit, as long a row to compare in, and what weighs it."""
        self._logits, self._best, self._weigh = logits, best, weigh
        self._temperature, self._top_p = filters.temperature, filters.top_p
        self._is_from = scratch[: len(logits)].view(np.bool_)[: len(logits)]
        self._levels = [float(np.nextafter(logits.dtype.type(best), np.inf)), -math.inf]
        self._weights, self._num_from = [1.0, 0.0], [0, len(logits)]
        self._least, self._most = [0.0], [float(len(logits))]
        self._weighed: Border | None = None

    def is_behind(self, place: int) -> bool:
        """Count until it is clear, or weigh."""
        if self._weighed is None:
            verdict = self._by_counts(place)
            if verdict is not None:
                return verdict
            self._weighed = self._weigh()
        return self._weighed.is_behind(place)

    def _by_counts(self, place: int) -> bool | None:
        at, kept, equals = self._logits[place], self._top_p, None
        self._look_at(at)
        next_above = np.nextafter(at, at.dtype.type(np.inf))
        for _ in range(_MOST_LEVELS - len(self._levels)):
            least, most = self._least, self._most
            here = self._levels.index(float(at)) - 1  # the tokens between this level and the one above, perhaps equals
            is_alone = self._levels[here] == float(next_above)
            if is_alone:
                equals = self._mass_of_equals_before(place) if equals is None else equals
                some_before, all_before, some_after, all_after = (
                    equals,
                    equals,
                    most[here] - equals,
                    most[here] - equals,
                )
            else:
                weight = self._weights[here + 1]
                some_before, all_before, some_after, all_after = 0.0, most[here] - weight, weight, most[here]
            some_before, all_before = some_before + sum(least[:here]), all_before + sum(most[:here])
            some_after, all_after = some_after + sum(least[here + 1 :]), all_after + sum(most[here + 1 :])
            near = _ROUGH * (all_before + all_after)
            if all_before + near < kept * (all_before + some_after):
                return True
            if some_before - near > kept * (some_before + all_after):
                return False
            doubts = [high - low for low, high in zip(least, most, strict=True)]
            doubts[here] = 0.0 if is_alone else most[here]
            above, below = doubts[: here + 1], doubts[here + 1 :]
            is_above = max(above) * (1 - kept) > max(below) * kept
            widest = above.index(max(above)) if is_above else here + 1 + below.index(max(below))
            self._look_at(next_above if widest == here else self._between(widest))
        return None

    def _mass_of_equals_before(self, place: int) -> float:
        at = self._logits[place]
        return int(np.count_nonzero(self._logits[:place] == at)) * self._weights[self._levels.index(float(at))]

    def _look_at(self, level: np.floating) -> None:
        """Count the tokens from this level on."""
        value = float(level)
        place = bisect_left(self._levels, -value, key=neg)
        if self._levels[place] == value:
            return
        num_from = int(np.count_nonzero(np.greater_equal(self._logits, level, out=self._is_from)))
        weight = math.exp((value - self._best) / self._temperature)
        higher, lower = num_from - self._num_from[place - 1], self._num_from[place] - num_from
        self._least[place - 1 : place] = [higher * weight, lower * self._weights[place]]
        self._most[place - 1 : place] = [higher * self._weights[place - 1], lower * weight]
        self._levels.insert(place, value)
        self._weights.insert(place, weight)
        self._num_from.insert(place, num_from)

    def _between(self, place: int) -> np.floating:
        """A level in the middle between two; below all of them, one of a third of the last one's weight."""
        upper, lower = self._levels[place : place + 2]
        middle = (upper + lower) / 2 if lower > -math.inf else upper - self._temperature
        level: np.floating = self._logits.dtype.type(middle)
        return level


def in_parts(weights: NDArray[np.float32]) -> list[tuple[slice, float]]:
    """Parts of a row, and their sums; a single one where it is short."""
    size = len(weights) if len(weights) <= FEW else -(-len(weights) // (_PARTS * _COLUMNS)) * _COLUMNS
    parts = [slice(first, first + size) for first in range(0, len(weights), size)]
    return [(part, total(weights[part])) for part in parts]


def total(weights: NDArray[np.float32]) -> float:
    """Their sum: column by column first, which is twice as fast as numpy's own order."""
    width = len(weights) // _COLUMNS
    columns, others = weights[: width * _COLUMNS].reshape(_COLUMNS, width), weights[width * _COLUMNS :]
    mass = np.add.reduce(np.add.reduce(columns, axis=0))
    return float(mass + np.add.reduce(others) if len(others) else mass)
