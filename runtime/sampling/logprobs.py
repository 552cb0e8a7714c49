"""Log-probabilities of the target's raw distribution: before bias, mask, penalties, temperature and filters.

A row's values depend on nothing but that row's logits, so they are the same by every method wherever the logits are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.likely_tokens import best_ids


class TokenLogprob(NamedTuple):
    """What the target thought of a token: natural logarithms.

    Attributes:
        value: of the token that was chosen.
        top: ids and values of the likeliest, best first, of equals the lowest id first; as many as were asked for.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: NDArray[np.floating], token: int, num_top: int) -> TokenLogprob:
    """Log-softmax of logits `[V]`, of one token and of the `num_top` likeliest.

    >>> found = token_logprob(np.log(np.array([0.5, 0.125, 0.375])), 1, 2)
    >>> round(float(np.exp(found.value)), 6), [token for token, _ in found.top]
    (0.125, [0, 2])
    """
    best = float(logits.max())
    behind = np.subtract(logits, best, dtype=np.float32, casting="same_kind")
    total = float(np.log(np.exp(behind, out=behind).sum(dtype=np.float64))) + best
    return TokenLogprob(float(logits[token]) - total, tuple(_likeliest(logits, best, num_top, total)))


def _likeliest(logits: NDArray[np.floating], best: float, count: int, total: float) -> list[tuple[int, float]]:
    if not count:
        return []
    ids = best_ids(logits, count, best) if count < len(logits) else np.arange(len(logits))
    ordered = ids[np.argsort(-logits[ids].astype(np.float64), kind="stable")]
    return [(int(token), float(logits[token]) - total) for token in ordered[:count]]
