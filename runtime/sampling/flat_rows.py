"""Flat rows, of which many tokens are about as likely as the best: what top-p keeps of them, mostly without weighing.

How many tokens reach a few levels of logits bounds the masses, and far from the border that decides beyond any
rounding. Where it does not, the row is weighed after all, so that every method keeps the same tokens. Does not own the
weighing (`likely_tokens`).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import neg, sub

import numpy as np
from numpy.typing import NDArray

IsBehind = Callable[[int], bool]
"""Whether the candidate at a place is kept: the border of what top-p keeps is behind it."""
ROUGH = 1e-3
"""Of a mass: far more than single precision loses in a sum."""
_SPARE = 0.08
"""Of the mass, what a head that is looked for holds beside what top-p keeps;"""
_THIN = 4
"""one in so many tokens are cheaper to pick out than to leave among the others."""
_NARROW = 0.5
"""In logs: half a level more says little."""
_MOST_LEVELS = 20
"""So many counts cost what the exponentials do."""


def head_ids(
    logits: NDArray[np.floating], some: NDArray[np.floating], best: float, temperature: float, top_p: float
) -> NDArray[np.int64] | None:
    """Who probably holds what top-p keeps of a flat row, and little more; None where they are many.

    `some` says of tokens from all over the row how far they are behind the best, over the temperature.
    """
    some = np.sort(some)[::-1]
    masses = np.cumsum(np.exp(some))
    least = some[np.searchsorted(masses, (top_p + _SPARE) * masses[-1])]
    if np.count_nonzero(some >= least) * _THIN > len(some):
        return None
    return np.flatnonzero(logits >= best + temperature * float(least))


class HeadBorder:
    """Of the best candidates of a flat row, which are weighed; of the others it counts how many reach a few levels."""

    def __init__(
        self,
        mass: float,
        mass_before: Callable[[int], float],
        others: "Levels",
        top_p: float,
        kept_mass: Callable[[], float],
    ) -> None:
        """Take the candidates' mass and what stands before one, the tokens that are none, and what weighs all."""
        self._mass, self._mass_before = mass, mass_before
        self._others, self._top_p, self._kept_mass = others, top_p, kept_mass
        self._weighed: float | None = None

    def is_behind(self, place: int) -> bool:
        """Sum what stands before the candidate."""
        return self.has_room(self._mass_before(place))

    def has_room(self, before: float) -> bool:
        """Whether what stands behind this much is kept: count until that is clear, or weigh all."""
        mass = self._mass
        while self._weighed is None:
            least, most = mass + sum(self._others.least), mass + sum(self._others.most)
            if before + ROUGH * most < self._top_p * least:
                return True
            if before - ROUGH * most > self._top_p * most:
                return False
            if self._others.is_full:
                self._weighed = self._kept_mass()
                break
            doubts = self._others.doubts()
            self._others.divide(doubts.index(max(doubts)))
        return before < self._weighed


class CountedBorder:
    """Of all tokens of a flat row `[V]`, by counting how many reach a few levels of logits.

    The level that is missing most is added until that decides. Where it does not, the row is weighed.
    """

    def __init__(self, levels: "Levels", top_p: float, weigh: Callable[[], IsBehind]) -> None:
        """Take the levels, and what weighs the row."""
        self._levels, self._top_p, self._weigh = levels, top_p, weigh
        self._weighed: IsBehind | None = None

    def is_behind(self, place: int) -> bool:
        """Count until it is clear, or weigh."""
        if self._weighed is None:
            verdict = self._by_counts(place)
            if verdict is not None:
                return verdict
            self._weighed = self._weigh()
        return self._weighed(place)

    def _by_counts(self, place: int) -> bool | None:
        levels, kept, equals = self._levels, self._top_p, None
        at = levels.logits[place]
        levels.add(at)
        next_above = np.nextafter(at, at.dtype.type(np.inf))
        while not levels.is_full:
            here = levels.place(at) - 1  # the tokens between this level and the one above, perhaps equals
            least, most = levels.least, levels.most
            weight = levels.weights[here + 1]
            is_alone = levels.values[here] == float(next_above)
            if is_alone:
                equals = levels.num_equal_before(place) * weight if equals is None else equals
                before, rest = (equals, equals), (most[here] - equals, most[here] - equals)
            else:
                before, rest = (0.0, most[here] - weight), (weight, most[here])
            before = before[0] + sum(least[:here]), before[1] + sum(most[:here])
            rest = rest[0] + sum(least[here + 1 :]), rest[1] + sum(most[here + 1 :])
            near = ROUGH * (before[1] + rest[1])
            if before[1] + near < kept * (before[1] + rest[0]):
                return True
            if before[0] - near > kept * (before[0] + rest[1]):
                return False
            doubts = levels.doubts()
            doubts[here] = 0.0 if is_alone else most[here]
            doubts = [doubt * (kept if i > here else 1 - kept) for i, doubt in enumerate(doubts)]
            widest = doubts.index(max(doubts))
            if widest == here and levels.is_narrow(here):
                levels.add(next_above)
            else:
                levels.divide(widest)
        return None


class Levels:
    """How many tokens of a row reach some levels of logits, and what those between two levels weigh.

    A token between two levels weighs at least what the lower one says and at most what the upper one does.

    Attributes:
        logits: of the row, `[V]`.
        values: the levels, the highest first; the last is `-inf`.
        weights: of a token at each, relative to the best one.
        least, most: bounds of the mass between a level and the next.
    """

    def __init__(self, logits: NDArray[np.floating], best: float, temperature: float, first: float, count: int) -> None:
        """Take a row, its best logit, and a first level, which `count` tokens reach."""
        self.logits, self._best, self._temperature = logits, best, temperature
        self.values, self.weights, self._counts = [first, -math.inf], [self._weight(first), 0.0], [count, len(logits)]
        self.least, self.most = [0.0], [(len(logits) - count) * self.weights[0]]
        self._num_left = _MOST_LEVELS

    @property
    def is_full(self) -> bool:
        """Whether weighing the row is the cheaper way to know more."""
        return self._num_left <= 0

    def place(self, level: np.floating) -> int:
        """Where a level is, or would be."""
        return bisect_left(self.values, -float(level), key=neg)

    def add(self, level: np.floating) -> None:
        """Count the tokens that reach this level."""
        place, value = self.place(level), float(level)
        self._num_left -= 1
        if self.values[place] == value:
            return
        count, weight = int(np.count_nonzero(self.logits >= level)), self._weight(value)
        higher, lower = count - self._counts[place - 1], self._counts[place] - count
        self.least[place - 1 : place] = [higher * weight, lower * self.weights[place]]
        self.most[place - 1 : place] = [higher * self.weights[place - 1], lower * weight]
        self.values.insert(place, value)
        self.weights.insert(place, weight)
        self._counts.insert(place, count)

    def divide(self, place: int) -> None:
        """Add a level in the middle between two; below all of them, one of a third of the last one's weight."""
        upper, lower = self.values[place : place + 2]
        middle = (upper + lower) / 2 if lower > -math.inf else upper - self._temperature
        self.add(self.logits.dtype.type(middle))

    def is_narrow(self, place: int) -> bool:
        """Whether what weighs between a level and the next is known well enough."""
        return self.values[place] - self.values[place + 1] < _NARROW * self._temperature

    def doubts(self) -> list[float]:
        """How far the bounds of each mass are apart."""
        return list(map(sub, self.most, self.least))

    def num_equal_before(self, place: int) -> int:
        """How many tokens before a place have its logit."""
        return int(np.count_nonzero(self.logits[:place] == self.logits[place]))

    def _weight(self, level: float) -> float:
        return math.exp(min(level - self._best, 0.0) / self._temperature)
