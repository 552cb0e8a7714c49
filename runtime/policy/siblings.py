"""Guesses beside a window: other tokens that are likely at its places, so that the pass checks a tree.

A window says one token for each place. Where it is wrong, the pass ends there, though the draft or head that made it
often knew the right token as its second or third. Such a token stands in a row of its own, beside the window: if it is
the target's choice, its row says one token more. It costs a row, so that it pays where rows are nearly free. Changes no
token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.policy.windows import Share, WindowLength
from mirrorsd.runtime.sampling.chooser import TokenChooser

_WORTH = 0.5
"""Of a token, what a right sibling brings: the draft has prepared less for what comes behind it, so that the next
window is shorter, or drafted anew. 0.3: 0.96 to 1.00. 0.7: 0.98 to 1.00 (as `bench/studies/trees/paced_trees.py`,
SmolLM2 and the storyteller, greedy and at T = 1, mirror decoding on `paced-laptop` and `paced-lunar-lake`)."""
_NONE: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Siblings(NamedTuple):
    """Tokens `[n]` beside a window, and the row `parents [n]` that each follows; none is the window's own one there.

    Row 0 is the head token's, row `i` that of window token `i`.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]


NO_SIBLINGS = Siblings(_NONE, _NONE)


def pass_parents(num_again: int, num_chained: int, siblings: Siblings) -> NDArray[np.int64]:
    """The row that each row of a pass follows: the first `num_chained` each other, siblings those of the window.

    >>> pass_parents(1, 4, Siblings(np.array([7, 8]), np.array([0, 1]))).tolist()
    [-1, 0, 1, 2, 1, 2]
    """
    return np.concatenate([np.arange(-1, num_chained - 1), num_again + siblings.parents])


class Known(NamedTuple):
    """What a draft or a head thinks at a window's places.

    `shares` and `num_main` are those of `WindowLength.cut`; entry `t` of `ids` and `logprobs` (`[m]` each) are
    candidates for window token `t`.
    """

    shares: Sequence[Share]
    num_main: int
    ids: Sequence[NDArray[np.int64]]
    logprobs: Sequence[NDArray[np.float32]]


class SiblingChooser:
    """Chooses siblings for the windows of one request, at most `most` for each."""

    def __init__(self, chooser: TokenChooser, length: WindowLength, most: int) -> None:
        self._chooser, self._length, self._most = chooser, length, most
        self._expected = self._verified = 0.0

    def choose(self, window: NDArray[np.int64], known: Known, first: int, room: int) -> Siblings:
        """Those that are worth more than their rows, for a window whose first token stands at position `first`.

        Their chance is that of the window up to there, times that of its next token being wrong, times the token's
        share among the others. How often such chances come true is learned. What they
        promise is added to the window's worth.
        """
        self._expected = 0.0
        count = min(len(window), len(known.ids))
        if not count or self._length.joint.num_beside:
            return NO_SIBLINGS
        offers = self._offers(window[:count], known, first)[: min(self._most, room)]
        costs = self._length.row_costs(len(window), len(offers))
        worth = _WORTH * self._length.learned.siblings.value
        gains = [offer[0] * worth - cost for offer, cost in zip(offers, costs, strict=False)]
        taken = [offer for offer, gain in zip(offers, gains, strict=False) if gain > 0]
        self._expected = sum(chance for chance, _, _ in taken)
        self._length.worth += sum(gain for gain in gains if gain > 0)
        return Siblings(
            np.array([token for _, token, _ in taken], dtype=np.int64),
            np.array([row for _, _, row in taken], dtype=np.int64),
        )

    def _offers(self, window: NDArray[np.int64], known: Known, first: int) -> list[tuple[float, int, int]]:
        """Chance, token and row of every candidate, likeliest first."""
        count = len(window)
        ids = np.stack(known.ids[:count])
        scores = self._chooser.rank(ids, np.stack(known.logprobs[:count]), first + np.arange(count))
        behind = np.subtract(scores, scores.max(axis=1, keepdims=True), dtype=np.float64)
        shares = np.where(ids == window[:, None], 0.0, np.exp(behind))
        total = shares.sum(axis=1, keepdims=True)
        shares = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0).tolist()
        found, before = [], 1.0
        for row, reached in enumerate(self._length.reach(known.shares[:count], known.num_main)):
            wrong = before - reached
            found += [(wrong * share, token, row) for token, share in zip(ids[row].tolist(), shares[row], strict=True)]
            before = reached
        return sorted((offer for offer in found if offer[0] > 0), reverse=True)

    def begin(self) -> None:
        """The siblings chosen last are verified from now on."""
        if self._expected:
            self._verified, self._expected = self._expected, 0.0

    def observe(self, *, was_right: bool) -> None:
        """Learn whether one of the siblings that were verified was right."""
        if self._verified:
            self._length.learned.siblings.observe(float(was_right), self._verified)
            self._verified = 0.0
