"""The penalty of tokens that are already in the text: exactly for the target, roughly for draft and exits.

The target's logits are penalised as transformers does it (CTRL, arXiv 1909.05858). Draft and exits give probabilities,
from which their logits cannot be told: what a likely token loses is taken from the target's best logits lately. A
wrong estimate costs speed, never a token.
"""

import numpy as np
from numpy.typing import NDArray

_MEMORY = 0.9
_SHARE = 0.6
"""Of the estimated loss, what draft and exits are told: on the sample more than half of it, and not all, did best."""


class RepetitionPenalty:
    """One request's penalty. The scheduler's thread applies it; `handicap` and `handicaps` may be read from any."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self._seen: NDArray[np.float64] = np.zeros(0)  # 1 where the text has the token
        self._num_read = 0
        self._best_logit: float | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether it changes anything."""
        return self._penalty != 1.0

    def apply(self, scores: NDArray[np.float64], history: NDArray[np.int64]) -> NDArray[np.float64]:
        """Penalise the target's logits `[V]`, in place, after the text `history`; learns how high the best one is."""
        best = float(scores.max())
        known = best if self._best_logit is None else self._best_logit
        self._best_logit = _MEMORY * known + (1 - _MEMORY) * best
        self._read(history, len(scores))
        return penalise_repetition(scores, history, self._penalty)

    def handicap(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """What likely tokens `[..., m]` lose, in logits: nothing if the text has them not, or was not read yet."""
        lost: NDArray[np.float64] = self._seen[ids] * self._loss if self._num_read else np.zeros(ids.shape)
        return lost

    def handicaps(self, vocab_size: int) -> NDArray[np.float64]:
        """What every token of the vocabulary would lose, `[V]`, were it likely."""
        lost: NDArray[np.float64] = self._seen[:vocab_size] * self._loss if self._num_read else np.zeros(vocab_size)
        return lost

    @property
    def _loss(self) -> float:
        best = self._best_logit or 0.0
        return _SHARE * (best - (best / self._penalty if best > 0 else best * self._penalty))

    def _read(self, history: NDArray[np.int64], vocab_size: int) -> None:
        """Note the tokens of a text that only grows."""
        if not self._num_read:
            self._seen = np.zeros(vocab_size)
        self._seen[history[self._num_read :]] = 1.0
        self._num_read = len(history)


def penalise_repetition(scores: NDArray[np.float64], history: NDArray[np.int64], penalty: float) -> NDArray[np.float64]:
    """Weaken tokens that are already in the text: divide positive scores, multiply others.

    >>> penalise_repetition(np.array([2.0, -1.0, 3.0]), np.array([0, 1]), 2.0).tolist()
    [1.0, -2.0, 3.0]
    """
    seen = np.unique(history)
    seen_scores = scores[seen]
    scores[seen] = np.where(seen_scores > 0, seen_scores / penalty, seen_scores * penalty)
    return scores
