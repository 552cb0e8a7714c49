"""A request's logit processors: what bias, penalties and filters make of the target's logits, and of guesses.

The target's logits are changed in this order: the caller's bias; the repetition penalty, as transformers does it (CTRL,
arXiv 1909.05858), for tokens of prompt and text; presence and frequency penalty, as OpenAI defines them, for tokens of
the text alone; then the filters (`likely_tokens` has them). Draft and exits name a few candidates with probabilities,
from which their logits cannot be told. What a repetition costs a likely token is taken from the target's best logits
lately, and which candidates the filters will drop from the probability that the list lacks. A wrong estimate costs
speed, never a token.

Log-probabilities are those of the target's raw distribution, before all of this. A row's values depend on nothing but
that row's logits, so they are the same by every method wherever the logits are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.sampling.likely_tokens import best_ids

_MEMORY = 0.9
_SHARE = 0.6
"""Of the estimated loss, what draft and exits are told: on the sample more than half of it, and not all, did best."""


class Penalties:
    """One request's penalties and biases. The scheduler's thread applies them; handicaps may be read from any.

    Attributes:
        needs_history: whether they depend on the text.
        is_wanted: whether they change anything.
    """

    def __init__(self, config: GenerationConfig, num_prompt: int = 0) -> None:
        """Take the settings; `num_prompt` tokens of a history are the prompt's."""
        self._repetition = config.repetition_penalty or 1.0
        self._presence, self._frequency = config.presence_penalty, config.frequency_penalty
        self._bias_ids = np.array([*config.biases], dtype=np.int64)
        self._biases = np.array([*config.biases.values()], dtype=np.float64)
        self.needs_history = self._repetition != 1.0 or self._presence != 0 or self._frequency != 0
        self.is_wanted = self.needs_history or len(self._bias_ids) > 0
        self._num_prompt, self._num_read = num_prompt, 0
        self._seen: NDArray[np.float64] = np.zeros(0)  # 1 where prompt or text have the token
        self._counts: NDArray[np.float64] = np.zeros(0)  # how often the text has it
        self._best_logit: float | None = None

    def apply(self, scores: NDArray[np.float64], history: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """Change the target's logits `[V]`, in place, after the text `history`; learns how high the best one is."""
        if history is not None and self.needs_history:
            best = float(scores.max())
            known = best if self._best_logit is None else self._best_logit
            self._best_logit = _MEMORY * known + (1 - _MEMORY) * best
            self._read(history, len(scores))
        scores[self._bias_ids] += self._biases
        if history is None:
            return scores
        if self._repetition != 1.0:
            penalise_repetition(scores, history, self._repetition)
        if self._presence or self._frequency:
            penalise_counts(scores, history[self._num_prompt :], self._presence, self._frequency)
        return scores

    def handicap(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """What likely tokens `[..., m]` lose, in logits; of the text only what was read yet counts."""
        lost: NDArray[np.float64] = np.zeros(ids.shape)
        if self._num_read:
            lost += self._seen[ids] * self._loss + self._lost_by_counts(self._counts[ids])
        for token, bias in zip(self._bias_ids.tolist(), self._biases.tolist(), strict=True):
            lost -= bias * (ids == token)
        return lost

    def handicaps(self, vocab_size: int) -> NDArray[np.float64]:
        """What every token of the vocabulary would lose, `[V]`, were it likely."""
        lost: NDArray[np.float64] = np.zeros(vocab_size)
        if self._num_read:
            lost += self._seen[:vocab_size] * self._loss + self._lost_by_counts(self._counts[:vocab_size])
        is_inside = self._bias_ids < vocab_size
        lost[self._bias_ids[is_inside]] -= self._biases[is_inside]
        return lost

    def _lost_by_counts(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._presence * (counts > 0) + self._frequency * counts

    @property
    def _loss(self) -> float:
        best = self._best_logit or 0.0
        return _SHARE * (best - (best / self._repetition if best > 0 else best * self._repetition))

    def _read(self, history: NDArray[np.int64], vocab_size: int) -> None:
        """Note the tokens of a text that only grows."""
        if not self._num_read:
            self._seen, self._counts = np.zeros(vocab_size), np.zeros(vocab_size)
        self._seen[history[self._num_read :]] = 1.0
        np.add.at(self._counts, history[max(self._num_read, self._num_prompt) :], 1.0)
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


def penalise_counts(
    scores: NDArray[np.float64], history: NDArray[np.int64], presence: float, frequency: float
) -> NDArray[np.float64]:
    """Take `presence` from the score of each token of the text, and `frequency` for each time that it stands there.

    >>> penalise_counts(np.array([2.0, 2.0, 2.0]), np.array([0, 1, 1]), 0.5, 0.25).tolist()
    [1.25, 1.0, 2.0]
    """
    seen, counts = np.unique(history, return_counts=True)
    scores[seen] -= presence + frequency * counts
    return scores


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
