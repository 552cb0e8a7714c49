"""A request's logit processors: what bias, penalties and filters make of the target's logits, and of guesses.

The target's logits are changed in this order: the caller's bias; the repetition penalty, as transformers does it (CTRL,
arXiv 1909.05858), for tokens of prompt and text; presence and frequency penalty, as OpenAI defines them, for tokens of
the text alone; then the filters (`filters` has them). Draft and exits name a few candidates with probabilities,
from which their logits cannot be told. What a repetition costs a likely token is taken from the target's best logits
lately, and which candidates the filters will drop from the probability that the list lacks. A wrong estimate costs
speed, never a token.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.texts.config import GenerationConfig

_MEMORY = 0.9
_SHARE = 0.6
"""Of the estimated loss, what draft and exits are told: on the sample more than half of it, and not all, did best."""
_LEAST, _NOTHING = -60.0, 1e-12
"""The least log-share and mass that are told from none."""
_MOST = float(np.log(np.finfo(np.float64).max))
"""In logs: the largest number there is."""


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


class ShortlistFilter(NamedTuple):
    """A request's filters; `top_k = 0`, `top_p = 1` and `min_p = 0` keep everything."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def keeps_all(self) -> bool:
        """Whether no token is ever dropped."""
        return self.top_k <= 0 and self.top_p >= 1 and self.min_p <= 0

    @property
    def is_by_rank_alone(self) -> bool:
        """Whether tokens fall by their rank only: the likeliest decide it, not those that noise has brought up."""
        return self.top_k > 0 and self.top_p >= 1 and self.min_p <= 0

    def dropped(self, logprobs: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Say which candidates `[..., m]` fall: log-probabilities before the temperature, in any order.

        Rows of which nothing is known (`-inf`) keep what they have.

        >>> by_mass = ShortlistFilter(temperature=1.0, top_k=0, top_p=0.8, min_p=0.0)
        >>> by_mass.dropped(np.log(np.array([0.1, 0.6, 0.3]))).tolist()
        [True, False, False]
        >>> ShortlistFilter(0.5, top_k=0, top_p=1.0, min_p=0.1).dropped(np.log(np.array([0.6, 0.3, 0.1]))).tolist()
        [False, False, True]
        """
        best = logprobs.max(axis=-1, keepdims=True)
        is_known = np.isfinite(best)
        behind = np.where(is_known, np.subtract(logprobs, np.where(is_known, best, 0.0), dtype=np.float64), 0.0)
        floor = np.full(best.shape, -np.inf)
        if self.min_p > 0:
            floor[:] = self.temperature * np.log(self.min_p)
        if self.top_k > 0 or self.top_p < 1:
            np.maximum(floor, self._least_kept(behind, best), out=floor)
        fallen: NDArray[np.bool_] = behind < floor
        return fallen

    def _least_kept(self, behind: NDArray[np.float64], best: NDArray[np.floating]) -> NDArray[np.float64]:
        """The last candidate `[..., 1]` that top-k, then top-p keep."""
        ordered = -np.sort(-behind, axis=-1)
        kept = ordered.shape[-1]
        mass = np.exp(ordered / self.temperature)
        if 0 < self.top_k <= kept:
            kept = self.top_k
            total = mass[..., :kept].sum(axis=-1, keepdims=True)
        else:
            total = mass.sum(axis=-1, keepdims=True) + self._unseen(ordered, best)
        if self.top_p >= 1:
            return ordered[..., kept - 1 : kept]
        before = np.cumsum(mass[..., :kept], axis=-1) - mass[..., :kept]
        num_kept = (before < self.top_p * total).sum(axis=-1, keepdims=True)
        return np.take_along_axis(ordered, np.maximum(num_kept, 1) - 1, axis=-1)

    def _unseen(self, ordered: NDArray[np.float64], best: NDArray[np.floating]) -> NDArray[np.float64]:
        """Mass of the tokens outside the list, relative to the best, at the temperature; at most what top-k leaves.

        Before the temperature it is what the list lacks. It is shared out as a geometric sequence that goes on from
        the list's last candidate, of which every member then takes the temperature's power.
        """
        last = np.exp(np.maximum(ordered[..., -1:], _LEAST))
        lacking = np.exp(-best.astype(np.float64)) - np.exp(ordered).sum(axis=-1, keepdims=True)
        lacking = np.where(np.isfinite(lacking), np.maximum(lacking, _NOTHING), _NOTHING)
        power = 1 / self.temperature
        growth = np.expm1(np.minimum(power * np.log1p(last / lacking), _MOST))
        unseen: NDArray[np.float64] = last**power / growth
        if self.top_k > 0:
            np.minimum(unseen, (self.top_k - ordered.shape[-1]) * last**power, out=unseen)
        return unseen
