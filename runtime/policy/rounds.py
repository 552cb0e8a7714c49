"""Which rows a round of the draft has: every guess that is fed costs one, and stays if the row before confirms it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Behind a number: as in `windows`.
_FIRST_CHANCE = 0.5
"""That the draft confirms a guess, before any was seen. 0.2: 0.99 to 1.03. 0.8: 0.98 to 1.01."""
_CHANCE_MEMORY = 0.97
"""Of such chances, per guess. 0.9: 0.98 to 1.02. 0.99: 1.00 to 1.01."""


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
