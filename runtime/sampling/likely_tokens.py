"""Which tokens top-k, top-p and min-p keep of the target's logits, without sorting the vocabulary.

The definition: order the tokens by logit, ties by id. Top-k keeps the first k. Top-p keeps, of those, each one before
which less than `top_p` of their mass stands. Min-p keeps those with at least `min_p` of the first one's probability.

A sampled text needs one token, not the set: a few thousand *candidates* that hold all kept tokens are cheap to find,
and whether one of them is kept is one sum over those before it. So the best by noisy score are asked, one by one.
Masses are sums of float32 exponentials, a quarter of what a choice costs; `flat_rows` counts instead where it can.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.flat_rows import ROUGH, CountedBorder, HeadBorder, IsBehind, Levels, head_ids
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

FEW = 16_384
"""Tokens of which a sum costs next to nothing."""
_COLUMNS, _PARTS = 128, 4
_GROUPS = (128, 16)
_HEADS = (1e-3, 1e-5)
"""Shares of the best token's probability above which the head of a distribution is looked for."""
_LOG_OF_HEAD = math.log(_HEADS[0])
_EACH = 512
"""Every so many tokens say whether a row is flat."""
_HEAD_OF = 0.5
"""Of a flat row a head is looked for where top-p is below this."""
_ASKED = 16
_MARGIN = 2.5
"""Of `m` times the best token's probability the winner scores `log(m)` and more, rarely so much less."""
_QUIET = 1.5
"""Noise that a fifth of the tokens reach: below, all of a row costs no more than those."""
FAR = 0.2
"""A runner-up further behind is no near tie on any device, be it kept or not."""
_ROUGH = 1e-3
"""What single precision may cost a noisy score of a token that could win: a hundred times as much as it does."""


class RowNoise(Protocol):
    """The noise of one position."""

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of these tokens, `[n]`."""
        ...

    def whole(self) -> NDArray[np.float64]:
        """Of all tokens, `[V]`."""
        ...

    def loud(self, level: float, ids: NDArray[np.int64] | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places of all of these tokens (None: of all) with noise of `level` and more, and of some others; and it."""
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
        before, rest = self._mass_of_equals_before(place), self.mass
        near = ROUGH * rest
        for part, mass in self.parts:
            before += self._mass_above(place, part)
            rest -= mass
            if before > self.kept_mass + near:
                return False
            if before + rest < self.kept_mass - near:
                return True
        return before < self.kept_mass

    @property
    def mass(self) -> float:
        """Of all candidates."""
        return sum(mass for _, mass in self.parts)

    def mass_before(self, place: int) -> float:
        """What stands before the candidate."""
        return self._mass_of_equals_before(place) + sum(self._mass_above(place, part) for part, _ in self.parts)

    def _mass_of_equals_before(self, place: int) -> float:
        return float(self.weights[place]) * int(np.count_nonzero(self.logits[:place] == self.logits[place]))

    def _mass_above(self, place: int, part: slice) -> float:
        is_above = self.logits[part] > self.logits[place]
        above = self.scratch[: len(is_above)]
        above[:] = is_above
        above *= self.weights[part]
        return total(above)


class LikelyTokens(NamedTuple):
    """Candidates `[n]` that hold all kept tokens.

    Attributes:
        ids: ascending; None where every token is one.
        logits: before the temperature.
        best: the best of them.
        border: what top-p keeps of them; None where it keeps all.
        kept_mass: about what is kept weighs, of the best token's probability.
        floor: kept is what has at least this logit.
        scratch: see `new_scratch`.
    """

    ids: NDArray[np.int64] | None
    logits: NDArray[np.floating]
    best: float
    border: IsBehind | None
    kept_mass: float
    floor: float
    scratch: NDArray[np.float32]

    def keeps(self, place: int) -> bool:
        """Whether the candidate at this place is kept."""
        return bool(self.logits[place] >= self.floor) and (self.border is None or self.border(place))

    def best_kept(self, noise: RowNoise, temperature: float) -> list[tuple[int, float]]:
        """Place and noisy score of the two kept candidates (of the only one) that score best, best first.

        A score is `logit / temperature + noise`. What is better than one that is kept is kept, what is worse than one
        that is dropped is dropped: few have to be asked. A second one that is `FAR` behind is not.
        """
        if (self.ids is None or len(self.ids) > FEW) and (found := self._best_of_loud(noise, temperature)):
            return found
        return self._best_of_all(noise.whole() if self.ids is None else noise.of(self.ids), temperature)

    def _best_of_loud(self, noise: RowNoise, temperature: float) -> list[tuple[int, float]] | None:
        """The two best, where both have so much noise that no token with less can score as well; else None."""
        level = math.log(max(self.kept_mass, 1.0)) - _MARGIN
        if level < _QUIET:
            return None
        places, loud = noise.loud(level, self.ids)
        found, _ = self._first_kept(places, self._scores(places, loud, temperature))
        if len(found) < 2:
            return None
        _, score = found[1]
        return found if score - self.best / temperature > level + _ROUGH else None

    def _best_of_all(self, noise: NDArray[np.float64], temperature: float) -> list[tuple[int, float]]:
        rough = _behind(self.logits, self.best, temperature, self.scratch[1])
        np.add(rough, noise, out=rough, casting="same_kind")
        count = _ASKED
        while True:
            places = _best_places(rough, count)
            found, dropped_below = self._first_kept(places, self._scores(places, noise[places], temperature))
            if len(found) == 2 or len(places) < count:
                return found
            rough[self.logits < dropped_below] = -np.inf
            count *= 4

    def _scores(self, places: NDArray[np.int64], noise: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
        return self.logits[places].astype(np.float64) / temperature + noise

    def _first_kept(
        self, places: NDArray[np.int64], scores: NDArray[np.float64]
    ) -> tuple[list[tuple[int, float]], float]:
        """The two best that are kept of candidates with their `scores`, and a logit below which all are dropped."""
        found: list[tuple[int, float]] = []
        kept_from, dropped_below = np.inf, -np.inf
        for i in np.argsort(-scores, kind="stable"):
            place, score, at = int(places[i]), float(scores[i]), float(self.logits[places[i]])
            if at < dropped_below:
                continue
            is_far = bool(found) and found[0][1] - score > FAR
            if is_far or at > kept_from or self.keeps(place):
                kept_from = min(kept_from, at)
                found.append((place, score))
                if len(found) == 2:
                    break
            else:
                dropped_below = max(dropped_below, at)
        return found, dropped_below


def new_scratch(vocab_size: int) -> NDArray[np.float32]:
    """Rows to compute in: fresh ones of this length would cost as much as what is done with them."""
    return np.empty((3, vocab_size), dtype=np.float32)


def likely_tokens(
    logits: NDArray[np.floating], best: float, filters: ShortlistFilter, scratch: NDArray[np.float32]
) -> LikelyTokens:
    """The candidates of logits `[V]` (`best` is the largest), before the temperature; valid until `scratch` is reused.

    >>> logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    >>> filters = ShortlistFilter(1.0, top_k=0, top_p=0.8, min_p=0.0)
    >>> likely = likely_tokens(logits, float(logits.max()), filters, new_scratch(3))
    >>> [likely.keeps(place) for place in range(3)]
    [False, True, True]
    """
    ids, least_mass = None, 0.0
    if 0 < filters.top_k < len(logits):
        ids = best_ids(logits, filters.top_k, best)
    elif filters.top_p >= 1:
        ids, count = _few_above(logits, least_kept(best, filters, logits.dtype))
        least_mass = count * filters.min_p
    elif len(logits) > FEW:
        some = logits[::_EACH]
        if np.count_nonzero(some >= best + filters.temperature * _LOG_OF_HEAD) * _EACH > FEW:
            weights = np.exp(_behind(some, best, filters.temperature, scratch[2]))
            return _flat(logits, best, filters, scratch, _EACH * float(weights.sum()))
    return weigh(ids, logits if ids is None else logits[ids], best, filters, scratch, least_mass)


def least_kept(best: float, filters: ShortlistFilter, dtype: "np.dtype[np.floating]") -> float:
    """The least logit that min-p keeps beside the `best` one."""
    if filters.min_p <= 0:
        return -math.inf
    return float(dtype.type(best + filters.temperature * math.log(filters.min_p)))


def weigh(
    ids: NDArray[np.int64] | None,
    found: NDArray[np.floating],
    best: float,
    filters: ShortlistFilter,
    scratch: NDArray[np.float32],
    least_mass: float = 0.0,
) -> LikelyTokens:
    """Tokens `ids` (None: all) with logits `found`, and what top-p and min-p keep of them.

    Without a top-p nothing is summed; then at least `least_mass` is kept.
    """
    floor = least_kept(best, filters, found.dtype)
    if filters.top_p >= 1:
        return LikelyTokens(ids, found, best, None, least_mass, floor, scratch)
    border = _weighed(found, best, filters, scratch)
    everything = LikelyTokens(ids, found, best, border.is_behind, border.kept_mass, floor, scratch)
    return _head(everything, border) if ids is None else everything


def _weighed(
    found: NDArray[np.floating], best: float, filters: ShortlistFilter, scratch: NDArray[np.float32]
) -> WeighedBorder:
    weights = _behind(found, best, filters.temperature, scratch[0])
    np.exp(weights, out=weights)
    parts = in_parts(weights)
    return WeighedBorder(found, weights, parts, filters.top_p * sum(mass for _, mass in parts), scratch[2])


def _flat(
    logits: NDArray[np.floating],
    best: float,
    filters: ShortlistFilter,
    scratch: NDArray[np.float32],
    about_mass: float,
) -> LikelyTokens:
    """Candidates of a row where many tokens are about as likely as the best.

    Those that hold what is kept and more are picked out, if they are not too many; else all are candidates. Neither way
    weighs the whole row, unless a candidate stands near the border.
    """
    kept_mass, floor = filters.top_p * about_mass, least_kept(best, filters, logits.dtype)
    ids = None
    if filters.top_p < _HEAD_OF:
        some = _behind(logits[:: _EACH // 4], best, filters.temperature, scratch[2])
        ids = head_ids(logits, some, best, filters.temperature, filters.top_p)
    if ids is not None:
        head = _weighed(logits[ids], best, filters, scratch)
        levels = Levels(logits, best, filters.temperature, float(head.logits.min()), len(ids))
        # The head's weights lie in the first row of the scratch: those of all go to the last one.
        border = HeadBorder(
            *(head.mass, head.mass_before, levels, filters.top_p),
            kept_mass=lambda: _weighed(logits, best, filters, scratch[::-1]).kept_mass,
        )
        if not border.has_room(head.mass):
            return LikelyTokens(ids, head.logits, best, border.is_behind, kept_mass, floor, scratch)
    levels = Levels(logits, best, filters.temperature, float(np.nextafter(logits.dtype.type(best), np.inf)), 0)
    counted = CountedBorder(levels, filters.top_p, lambda: _weighed(logits, best, filters, scratch).is_behind)
    return LikelyTokens(None, logits, best, counted.is_behind, kept_mass, floor, scratch)


def _behind(
    logits: NDArray[np.floating], best: float, temperature: float, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """How far they are behind the best, over the temperature: 0 and less."""
    behind = out[: len(logits)]
    with np.errstate(over="ignore"):
        np.subtract(logits, best, out=behind, casting="same_kind")
        behind *= np.float32(1 / temperature)
    return behind


def _few_above(logits: NDArray[np.floating], floor: float) -> tuple[NDArray[np.int64] | None, int]:
    """Who has at least this logit, if they are few, and how many they are."""
    is_above = logits >= logits.dtype.type(floor)
    count = int(np.count_nonzero(is_above))
    return np.flatnonzero(is_above) if count <= FEW else None, count


def best_ids(logits: NDArray[np.floating], count: int, best: float) -> NDArray[np.int64]:
    """The `count` best ids, ascending; of equals at the border the lowest."""
    low = _low_border(logits, count)
    tokens = np.flatnonzero(logits >= low)
    if low == best:
        return tokens[:count]
    found = logits[tokens]
    border = np.partition(found, len(found) - count)[len(found) - count]
    places = np.flatnonzero(found >= border)
    if len(places) > count:
        equals = np.flatnonzero(found[places] == border)
        places = np.delete(places, equals[len(equals) - (len(places) - count) :])
    return tokens[places]


def _low_border(values: NDArray[np.floating], count: int) -> np.floating:
    """What at least the `count` largest reach, and few more: the `count`-th best of groups of values."""
    for size in _GROUPS:
        width = len(values) // size
        if count * 2 <= width:
            best = values[: width * size].reshape(size, width).max(axis=0)
            border: np.floating = np.partition(best, width - count)[width - count]
            return border
    lowest: np.floating = values.min()
    return lowest


def _head(everything: LikelyTokens, border: WeighedBorder) -> LikelyTokens:
    """Those that stand out, where they are few and hold the mass that is kept; else all."""
    for share in _HEADS:
        stands_out = border.weights >= np.float32(share)
        if np.count_nonzero(stands_out) > FEW:
            break
        ids = np.flatnonzero(stands_out)
        weights = border.weights[ids]
        if total(weights) >= border.kept_mass:
            found = everything.logits[ids]
            head = border._replace(logits=found, weights=weights, parts=in_parts(weights))
            return everything._replace(ids=ids, logits=found, border=head.is_behind)
    return everything


def _best_places(rough: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places of at least the `count` best that are not `-inf`, in any order, for scores as rough as these."""
    border = _low_border(rough, count) - np.float32(_ROUGH)
    places = np.flatnonzero(rough >= border)
    return places[rough[places] > -np.inf] if border == -np.inf else places


def in_parts(weights: NDArray[np.float32]) -> list[tuple[slice, float]]:
    """Parts of a row, and their sums; a single one where it is short."""
    size = len(weights) if len(weights) <= 4 * FEW else -(-len(weights) // (_PARTS * _COLUMNS)) * _COLUMNS
    parts = [slice(first, first + size) for first in range(0, len(weights), size)]
    return [(part, total(weights[part])) for part in parts]


def total(weights: NDArray[np.float32]) -> float:
    """Their sum: column by column first, which is twice as fast as numpy's own order."""
    width = len(weights) // _COLUMNS
    columns, others = weights[: width * _COLUMNS].reshape(_COLUMNS, width), weights[width * _COLUMNS :]
    mass = np.add.reduce(np.add.reduce(columns, axis=0))
    return float(mass + np.add.reduce(others) if len(others) else mass)
