"""The target's choice at a position, and how draft and exit candidates are ranked for the same position.

Greedy takes the best logit. Sampling takes `argmax(logits / T + G(seed, position, token))` over the tokens that top-k,
top-p and min-p keep (ALGORITHM.md, "Exactness"): exactly the target's law, and the same text for the same seed whatever
the method. Filters run in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.generation_config import GenerationConfig
from mirrorsd.runtime.noise import gumbel, gumbel_row
from mirrorsd.runtime.repetition import RepetitionPenalty
from mirrorsd.runtime.shortlist_filter import ShortlistFilter

_HEAD_TOKENS = 512
_DROPPED_BEHIND = 8.0
"""In logs: how far candidates that the target will probably drop stand behind where they would."""
NoiseSource = Callable[[int, int], NDArray[np.float64]]
"""Position, size of the vocabulary -> what competes with the log-probabilities there, `[V]`."""


class Choice(NamedTuple):
    """A chosen token and how far (in logits, or noisy scores) the runner-up is behind."""

    token: int
    gap: float


class TokenChooser:
    """Chooses tokens for one request. Not thread-safe for `choose`; `rank` may be called from any thread.

    Attributes:
        keeps_order: whether candidates compete by their log-probabilities alone, so that the likeliest wins.
        is_heard_by_draft: whether the draft's graph takes noise and penalty, over its whole vocabulary.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self.is_sampling = config.is_sampling
        self._repetition = RepetitionPenalty(config.repetition_penalty)
        self.needs_history = self._repetition.is_wanted
        self.needs_logits = config.is_sampling or self.needs_history
        self.keeps_order = not self.needs_logits
        self._temperature = config.temperature or 1.0
        self._seed = config.seed or 0
        self._top_k, self._top_p, self._min_p = config.top_k, config.top_p, config.min_p
        self._filter = ShortlistFilter(self._temperature, config.top_k, config.top_p, config.min_p)
        self._is_filtered = config.is_sampling and not self._filter.keeps_all
        self._is_noisy = config.is_sampling and not self._filter.is_by_rank_alone
        self.is_heard_by_draft = False
        self._noise_by_position: dict[int, NDArray[np.float64]] = {}

    @property
    def draws_ahead(self) -> bool:
        """Whether there is noise to draw while the devices work."""
        return self._is_noisy and (self.is_heard_by_draft or not self._is_filtered)

    def draw_ahead(self, first_position: int, count: int, vocab_size: int) -> None:
        """Draw the noise of coming positions (while the devices work); forgets the positions before them."""
        if not self.draws_ahead:
            return
        known = self._noise_by_position.copy()  # the draft's thread may add to it
        self._noise_by_position = {position: noise for position, noise in known.items() if position >= first_position}
        for position in range(first_position, first_position + count):
            self._noise_at(position, vocab_size)

    def noise_source(self) -> NoiseSource | None:
        """Noise over the whole vocabulary, times the temperature, less the penalty; None where there is neither.

        Nor is there noise for top-k by itself: it keeps the likeliest, so that these are what the draft should name.
        May be called from any thread.
        """
        if not self._is_noisy:
            return (lambda _, vocab_size: -self._repetition.handicaps(vocab_size)) if self.needs_history else None
        return self._competing_row

    def _competing_row(self, position: int, vocab_size: int) -> NDArray[np.float64]:
        noise = self._temperature * self._noise_at(position, vocab_size)
        return noise - self._repetition.handicaps(vocab_size) if self.needs_history else noise

    def _noise_at(self, position: int, vocab_size: int) -> NDArray[np.float64]:
        noise = self._noise_by_position.get(position)
        if noise is None or len(noise) < vocab_size:
            noise = gumbel_row(self._seed, position, vocab_size)
            self._noise_by_position[position] = noise
        return noise[:vocab_size]

    def choose(self, logits: NDArray[np.floating], position: int, history: NDArray[np.int64] | None) -> Choice:
        """The target's token at `position`.

        Args:
            logits: `[V]`, the target's logits for this position.
            position: absolute position of the token to choose.
            history: ids of the text before `position`; needed only where `needs_history`.
        """
        scores = logits.astype(np.float64)
        if self.needs_history and history is not None:
            scores = self._repetition.apply(scores, history)
        if not self.is_sampling:
            return _best(None, scores)
        scores /= self._temperature
        if not self._is_filtered:
            return _best(None, scores + self._noise_at(position, len(scores)))
        tokens, kept_scores = keep_likeliest(scores, self._top_k, self._top_p, self._min_p)
        return _best(tokens, kept_scores + gumbel(self._seed, np.array([position]), tokens))

    def rank(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.floating], positions: NDArray[np.int64]
    ) -> NDArray[np.floating]:
        """Scores by which draft or exit candidates compete, with the noise that the target will use.

        Args:
            ids: `[..., m]` candidate ids.
            logprobs: `[..., m]` their log-probabilities.
            positions: `[...]` absolute position that each candidate list predicts.

        Returns:
            `[..., m]`; `logprobs` unchanged where they `keeps_order`, so that the first candidate wins.
        """
        return logprobs if self.keeps_order else self.scores(logprobs, self.noise(ids, positions))

    def scores(self, logprobs: NDArray[np.floating], noise: NDArray[np.float64] | float) -> NDArray[np.floating]:
        """As `rank`, for candidates whose `noise` is known: `logprobs` and result `[..., m]`."""
        if self.keeps_order:
            return logprobs
        competing: NDArray[np.floating] = logprobs / self._temperature + noise
        return competing - _DROPPED_BEHIND * self._filter.dropped(logprobs) if self._is_filtered else competing

    def noise(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64] | float:
        """What the target adds for tokens `[..., m]` at positions `[...]`, less the penalty; 0 where it adds none."""
        drawn = gumbel(self._seed, positions[..., None], ids) if self.is_sampling else 0.0
        return drawn - self._repetition.handicap(ids) / self._temperature if self.needs_history else drawn

    def guess(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.floating], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The likeliest candidate of each list: `[..., m]` -> `[...]`."""
        if self.keeps_order:
            return ids[..., 0]
        best = np.argmax(self.rank(ids, logprobs, positions), axis=-1)
        return np.take_along_axis(ids, best[..., None], axis=-1)[..., 0]


def keep_likeliest(
    scores: NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids and scores that top-k, then top-p, then min-p keep, best first (ties: lower id first).

    >>> keep_likeliest(np.log(np.array([0.1, 0.6, 0.3])), 0, 0.8, 0.0)[0].tolist()
    [1, 2]
    """
    exponentials = np.exp(scores - scores.max())
    mass = exponentials.sum()
    head = min(top_k or _HEAD_TOKENS, len(scores))
    tokens = _best_tokens(exponentials, head)
    if top_k:
        mass = exponentials[tokens].sum()
    elif top_p < 1 and exponentials[tokens].sum() < top_p * mass:
        tokens = _best_tokens(exponentials, len(scores))
    elif top_p >= 1:
        tokens = _best_tokens(exponentials, int((exponentials >= min_p).sum()))
    if top_p < 1:
        before = np.cumsum(exponentials[tokens]) - exponentials[tokens]
        tokens = tokens[before < top_p * mass]
    if min_p > 0:
        tokens = tokens[exponentials[tokens] >= min_p * exponentials[tokens[0]]]
    return tokens, scores[tokens]


def _best_tokens(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The `count` heaviest ids, heaviest first, lower id first among equals."""
    if count < len(weights):
        threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
        tokens = np.flatnonzero(weights >= threshold)
    else:
        tokens = np.arange(len(weights))
    order = np.argsort(-weights[tokens], kind="stable")
    return tokens[order][:count].astype(np.int64)


def _best(tokens: NDArray[np.int64] | None, scores: NDArray[np.float64]) -> Choice:
    best = int(np.argmax(scores))
    best_score = scores[best]
    scores[best] = -np.inf
    gap = float(best_score - scores.max()) if len(scores) > 1 else float("inf")
    return Choice(best if tokens is None else int(tokens[best]), gap)
