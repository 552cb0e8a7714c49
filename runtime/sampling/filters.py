"""Which tokens top-k, top-p and min-p keep of the target's logits, without sorting the vocabulary.

The definition: order the tokens by logit, ties by id. Top-k keeps the first k. Top-p keeps, of those, each one before
which less than `top_p` of their mass stands. Min-p keeps those with at least `min_p` of the first one's probability.

Masses are sums of float32 exponentials. Only tokens above a share of the best one's probability are sorted, where these
hold what is kept. Of a flat row, where they would be many, only those are that share a bin with the border.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

_HEADS = (1e-3, 1e-5)
"""Shares of the best token's probability above which the head of a distribution is looked for."""
_ROUGH = 1e-4
"""Of a mass: far more than single precision loses in a sum."""
_MANY, _NUM_BINS = 16_384, 4096
"""To sort more tokens than this costs more than to share them out among so many bins."""


def kept_tokens(logits: NDArray[np.floating], best: float, filters: ShortlistFilter) -> NDArray[np.int64] | None:
    """Ids, ascending, of what is kept of logits `[V]` before the temperature (`best` is the largest); None: of all.

    >>> logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    >>> kept_tokens(logits, float(logits.max()), ShortlistFilter(1.0, top_k=0, top_p=0.8, min_p=0.0))
    array([1, 2])
    """
    ids = best_ids(logits, filters.top_k, best) if 0 < filters.top_k < len(logits) else None
    found = logits if ids is None else logits[ids]
    if filters.top_p < 1:
        places = _kept_by_mass(found, best, filters)
        ids = places if ids is None else ids[places]
        found = logits[ids]
    if filters.min_p > 0:
        places = np.flatnonzero(found >= least_kept(best, filters, logits.dtype))
        ids = places if ids is None else ids[places]
    return ids


def least_kept(best: float, filters: ShortlistFilter, dtype: "np.dtype[np.floating]") -> float:
    """The least logit that min-p keeps beside the `best` one."""
    log_share = math.log(filters.min_p) if filters.min_p > 0 else -math.inf
    return float(dtype.type(best + filters.temperature * log_share))


def _kept_by_mass(logits: NDArray[np.floating], best: float, filters: ShortlistFilter) -> NDArray[np.int64]:
    """Places, ascending, of the tokens before which less than `top_p` of the mass stands."""
    with np.errstate(over="ignore"):
        weights = np.subtract(logits, best, dtype=np.float32, casting="same_kind")
        weights *= np.float32(1 / filters.temperature)
    np.exp(weights, out=weights)
    need = filters.top_p * float(weights.sum(dtype=np.float64))
    for share in _HEADS if len(logits) > _MANY else ():
        is_in = weights >= np.float32(share)
        if float(np.dot(weights, is_in.astype(np.float32))) >= need * (1 + _ROUGH):
            ids = np.flatnonzero(is_in)
            return ids[_before(logits[ids], weights[ids], need)]
    return _before(logits, weights, need)


def _before(logits: NDArray[np.floating], weights: NDArray[np.float32], need: float) -> NDArray[np.int64]:
    """Places, ascending, before which less than `need` stands; all that could be kept are among these tokens."""
    above, is_above = 0.0, np.zeros(len(weights), dtype=np.bool_)
    near = np.arange(len(weights))
    if len(weights) > _MANY:
        bins = (weights * np.float32(_NUM_BINS - 1)).astype(np.int32)  # ascending with the logits
        masses = np.bincount(bins, weights, _NUM_BINS)[::-1].cumsum()  # of the best bin, of the best two ..
        last = min(int(np.searchsorted(masses, need)), _NUM_BINS - 1)
        above = float(masses[last - 1]) if last else 0.0
        is_above, near = bins > _NUM_BINS - 1 - last, np.flatnonzero(bins == _NUM_BINS - 1 - last)
    ordered = near[np.argsort(-logits[near], kind="stable")]
    mass = weights[ordered].astype(np.float64)
    is_above[ordered[above + np.cumsum(mass) - mass < need]] = True
    return np.flatnonzero(is_above)


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
    """What at least the `count` largest reach, and few more: the `count`-th best of groups of values.

    There are as many groups as each has values, and twice `count` at least (`bench/claims/filter_cost.py`).
    """
    size = max(1, min(math.isqrt(len(values)), len(values) // (2 * count)))
    num_groups = len(values) // size
    best = values[: num_groups * size].reshape(size, num_groups).max(axis=0)
    border: np.floating = np.partition(best, num_groups - count)[num_groups - count]
    return border
