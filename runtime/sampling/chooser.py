"""The target's choice at a position, and how draft and exit candidates are ranked for the same position.

Greedy takes the best logit. Sampling takes `argmax(logits / T + G(seed, position, token))` over the tokens that top-k,
top-p and min-p keep (docs/exactness.md): exactly the target's law, and the same text for the same seed whatever
the method. Before that come the mask of a constrained text, the caller's bias and the penalties; filters run in the
order of transformers: temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.slot_draft import NoiseSource
from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.runtime.sampling.filters import best_ids, kept_tokens
from mirrorsd.runtime.sampling.logit_processors import Penalties, ShortlistFilter
from mirrorsd.runtime.sampling.noise import TextNoise
from mirrorsd.runtime.sampling.short_rows import ShortRow
from mirrorsd.texts.config import GenerationConfig

_DROPPED_BEHIND = 8.0
"""In logs: how far candidates that the target will probably drop stand behind where they would."""
_FEW_TOKENS = 4_096
"""So many are given noise in less time than a thread takes to be woken (`bench/claims/filter_cost.py --vocab 4096`: 25
us for 30). Sampled texts of such a vocabulary are 8 to 14 % faster by it."""


class TokenLogprob(NamedTuple):
    """What the target thought of a token: natural logarithms.

    Attributes:
        value: of the token that was chosen.
        top: ids and values of the likeliest, best first, of equals the lowest id first; as many as were asked for.
    """

    value: float
    top: tuple[tuple[int, float], ...] = ()


class Choice(NamedTuple):
    """A chosen token and how far (in logits, or noisy scores) the runner-up is behind; `inf` where there is none."""

    token: int
    gap: float


class Mask(Protocol):
    """What a constrained text may say next. It follows the text: one call of `advance` for every token."""

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come now, `[V]`."""

    def look_ahead(self, window: NDArray[np.int64]) -> None:
        """Work out what may come now and after each token of a window, while the devices work."""

    def advance(self, token: int) -> None:
        """The text goes on with this token."""

    def forced(self, most: int) -> NDArray[np.int64]:
        """The next tokens, at most so many, where there is one way on: a guess."""

    def num_allowed(self, window: NDArray[np.int64]) -> int:
        """How many of a window's leading tokens may come."""


class _Logprobs:
    """What the target thought of a text's tokens, until each is taken."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._found: dict[int, TokenLogprob] = {}

    def note(self, logits: NDArray[np.floating], token: int, position: int) -> None:
        """Of a token that was chosen at `position` of logits `[V]`, as the target gave them."""
        found = self._found[position] = token_logprob(logits, token, self._num_top)
        _check_finite(found.value, position)

    def take(self, position: int) -> TokenLogprob | None:
        """What was noted, once."""
        return self._found.pop(position, None)


class TokenChooser:
    """Chooses tokens for one request. Not thread-safe for `choose`; `rank` may be called from any thread.

    Attributes:
        mask: what its text may say; None where it may say anything.
        needs_logits: whether the choice takes the target's whole rows; otherwise its graph names the best token.
        filters: what its filters keep is all that the choice takes of a row; None where it takes more.
        keeps_order: whether candidates compete by their log-probabilities alone, so that the likeliest wins.
        is_heard_by_draft: whether the draft's graph takes noise and penalty, over its whole vocabulary.
    """

    def __init__(self, config: GenerationConfig, num_prompt: int = 0, mask: Mask | None = None) -> None:
        """Take a request's settings, the number of its prompt's tokens, and what its text may say."""
        self.is_sampling = config.is_sampling
        if config.is_sampling and config.seed is None:
            raise ConfigError("A sampled text needs a seed here: GenerationConfig.resolve draws one.")
        self.mask, self._penalties = mask, Penalties(config, num_prompt)
        self.keeps_order = not (config.is_sampling or self._penalties.is_wanted)
        self._logprobs = _Logprobs(config.top_logprobs) if config.logprobs else None
        self.needs_logits = not self.keeps_order or mask is not None or config.logprobs
        self._temperature = config.temperature or 1.0
        filters = ShortlistFilter(self._temperature, config.top_k or 0, config.top_p or 1.0, config.min_p or 0.0)
        self._filter = filters if config.is_sampling and not filters.keeps_all else None
        takes_more = self._penalties.is_wanted or mask is not None or config.logprobs
        self.filters = None if takes_more else self._filter
        self._is_noisy = config.is_sampling and not filters.is_by_rank_alone
        self.is_heard_by_draft = False
        self._noise = TextNoise(config.seed or 0)

    def draws_ahead(self, vocab_size: int) -> bool:
        """Whether there is enough to do while the devices work to have them work on a thread of their own."""
        return self.mask is not None or (self.draws_noise and vocab_size > _FEW_TOKENS)

    @property
    def draws_noise(self) -> bool:
        """Whether the choice takes noise for the whole vocabulary."""
        return self._is_noisy and (self.is_heard_by_draft or self._filter is None)

    def look_ahead(self, window: NDArray[np.int64]) -> None:
        """Work out what a constrained text may say in a window that is being verified."""
        if self.mask is not None:
            self.mask.look_ahead(window)

    def draw_ahead(
        self, first_position: int, count: int, vocab_size: int, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Draw the noise of coming positions, of the first in any case, until the pass `is_over`.

        Forgets the positions before them. What is left is drawn for those alone that the text gets to.
        """
        self._noise.forget_before(first_position)  # heads and drafts ask for rows, too
        if not self.draws_noise:
            return
        for position in range(first_position, first_position + count):
            if position > first_position and is_over():
                return
            self._noise.row(position, vocab_size)

    def be_heard(self) -> None:
        """Draw noise over the whole vocabulary however the text is sampled: a head chooses its guesses by it."""
        self.is_heard_by_draft, self._is_noisy = True, self.is_sampling

    def noise_source(self) -> NoiseSource | None:
        """Noise over the whole vocabulary, times the temperature, less penalties; None where there is neither.

        Nor is there noise for top-k by itself: it keeps the likeliest, so that these are what the draft should name.
        May be called from any thread.
        """
        if not self._is_noisy:
            return (lambda _, vocab_size: -self._penalties.handicaps(vocab_size)) if self._penalties.is_wanted else None
        return self._competing_row

    def _competing_row(self, position: int, vocab_size: int) -> NDArray[np.float64]:
        noise = self._temperature * self._noise.row(position, vocab_size)
        return noise - self._penalties.handicaps(vocab_size) if self._penalties.is_wanted else noise

    def choose(self, logits: NDArray[np.floating], position: int, history: NDArray[np.int64] | None) -> Choice:
        """The target's token at `position`. Called once for every token of the text, in order.

        Args:
            logits: `[V]`, the target's logits for this position.
            position: absolute position of the token to choose.
            history: ids of the text before `position`; only penalties need it.

        Raises:
            DeviceError: a logit is NaN or `+inf`, or all are `-inf`.
        """
        raw = logits
        if self.mask is not None:
            logits = np.where(self.mask.allowed(len(logits)), logits, -np.inf).astype(logits.dtype)
        if self._penalties.is_wanted:
            logits = self._penalties.apply(logits.astype(np.float64), history)
        choice = self._best_of(logits, position)
        if self.mask is not None:
            self.mask.advance(choice.token)
        if self._logprobs is not None:
            self._logprobs.note(raw, choice.token, position)
        return choice

    def choose_of(self, row: ShortRow, position: int) -> Choice:
        """As `choose`, of an `ordered` row that holds all that `filters` keep: the same token.

        Raises:
            DeviceError: a logit of the whole row is NaN or `+inf`.
        """
        assert self._filter is not None  # else no row is short
        _check_finite(row.mass, position)
        ids, logits = row.kept(self._filter)
        return self._best_kept(ids, logits, position, int(row.ids.max()) + 1)

    def take_logprob(self, position: int) -> TokenLogprob | None:
        """The log-probabilities of the token that was chosen at `position`, once; None where nobody asked for them."""
        return None if self._logprobs is None else self._logprobs.take(position)

    def _best_of(self, logits: NDArray[np.floating], position: int) -> Choice:
        if self._filter is not None:
            logits = logits.astype(np.float32) if logits.dtype == np.float16 else logits
            best = float(logits.max())
            _check_finite(best, position)
            ids = kept_tokens(logits, best, self._filter)
            return self._best_kept(ids, logits if ids is None else logits[ids], position, len(logits))
        scores = logits.astype(np.float64)
        if self.is_sampling:
            scores /= self._temperature
            scores += self._noise.row(position, len(scores))
        return _best(scores, position)

    def _best_kept(
        self, ids: NDArray[np.int64] | None, logits: NDArray[np.floating], position: int, vocab_size: int
    ) -> Choice:
        """Of tokens `ids` (None: all) with their `logits`, which are kept, the best and the runner-up."""
        scores = logits.astype(np.float64)
        scores /= self._temperature
        scores += self._noise.among(position, ids, vocab_size)
        place, gap = _best(scores, position)
        return Choice(place if ids is None else int(ids[place]), gap)

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
        return competing if self._filter is None else competing - _DROPPED_BEHIND * self._filter.dropped(logprobs)

    def noise(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64] | float:
        """What the target adds for tokens `[..., m]` at positions `[...]`, less the penalty; 0 where it adds none."""
        drawn = self._noise.at(positions, ids) if self.is_sampling else 0.0
        return drawn - self._penalties.handicap(ids) / self._temperature if self._penalties.is_wanted else drawn


def _best(scores: NDArray[np.float64], position: int) -> Choice:
    best = int(np.argmax(scores))
    best_score = float(scores[best])
    _check_finite(best_score, position)
    scores[best] = -np.inf
    return Choice(best, best_score - float(scores.max()))


def _check_finite(best: float, position: int) -> None:
    """`max` and `argmax` hand NaN on, so that one look at the best is one at all."""
    if not math.isfinite(best):
        raise no_finite_logits(position)


def no_finite_logits(position: int) -> DeviceError:
    """What is said of a target whose logits for a position are no numbers."""
    return DeviceError(
        f"The target returned NaN or infinite logits for position {position}. Half precision may have overflowed, "
        "or the device has failed: try another device map, or a bundle in bf16 or fp32."
    )


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
