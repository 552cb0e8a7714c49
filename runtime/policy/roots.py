"""What the draft prepares for: the likeliest (row, next token) roots, from the draft's own candidates and the exit's.

The one place that decides. `root_source` switches what it knows: `proxy` waits for the exit (the paper), `early` uses
the draft's own runners-up from the start, `progressive` starts like `early` and is corrected by each exit's message.

How likely a root is, two small logistic models per pair say, over what the draft and an exit say about a window: one at
which row the window fails, one which token comes there. Fitting them is `score_fitting`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.ledger import AcceptanceRate, ExitGuesses
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.texts.config import SpeculationConfig

Array = NDArray[np.float64]
_MISSING = 1.0
"""A candidate that one side does not name counts one (in logs) below the last that it does name. 0.3 and 3: 1.00 with
the weights of an untuned pair."""
_KNOWN = ("draft", "exit", "both")
DraftCandidates = tuple[NDArray[np.int64], NDArray[np.floating]]
"""Ids and log-probabilities `[g+1, m]` after the head token and after every window token."""


class RowWeights(NamedTuple):
    """Weights of what the rows before a window token say about it (see `row_features`)."""

    constant: float
    by_draft: float
    by_exit: float
    other_by_draft: float
    other_by_exit: float
    row: float
    rate: float


NUM_ROW_FEATURES, NUM_TOKEN_FEATURES = len(RowWeights._fields), 4


class RootWeights(NamedTuple):
    """Weights of one state of knowledge.

    `accept` weighs the row features, `correction` and `bonus` the token features (see `Candidates`): a correction is
    the token after a failed row, the bonus the one after a window that was right.
    """

    accept: RowWeights
    correction: tuple[float, ...]
    bonus: tuple[float, ...]


# Between plain probabilities (all 1) and what was fitted to the sample pair, where greedy choices proved surer than the
# shares say: another pair starts here until `mirrorsd tune` has seen it.
_BY_DRAFT = RootWeights(RowWeights(0.5, 2.0, 0.0, -0.8, 0.0, -0.5, 0.9), (2.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0))
_BY_EXIT = RootWeights(RowWeights(0.2, 0.0, 1.5, 0.0, -1.2, -0.5, 0.9), (0.0, 2.2, 0.0, 0.0), (0.0, 2.5, 0.0, 0.0))
_BY_BOTH = RootWeights(RowWeights(0.2, 1.5, 0.8, -0.3, -1.2, -0.5, 0.9), (0.8, 1.6, 0.0, 0.0), (0.9, 1.8, 0.0, 0.0))
DEFAULTS = {"draft": _BY_DRAFT, "exit": _BY_EXIT, "both": _BY_BOTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class RootScores:
    """The weights of a pair, by what is known: `draft`, `exit` or `both` (see `weights_name`).

    Attributes:
        fitted: weights that were fitted, such as `{"draft": ..., "both:3:sampled": ...}`; the defaults serve the rest.
    """

    fitted: Mapping[str, RootWeights] = field(default_factory=dict)

    def weights(self, known: str, layer: int, *, is_sampling: bool) -> RootWeights:
        """The weights for one state of knowledge."""
        return self.fitted.get(weights_name(known, layer, is_sampling=is_sampling)) or DEFAULTS[known]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {name: [[round(value, 4) for value in part] for part in parts] for name, parts in self.fitted.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave.

        Raises:
            ValueError: other names, or other numbers of weights.
        """
        sizes = [NUM_ROW_FEATURES, NUM_TOKEN_FEATURES, NUM_TOKEN_FEATURES]
        for name, parts in values.items():
            if name.split(":")[0] not in _KNOWN or [len(part) for part in parts] != sizes:
                raise ValueError(f"root scores {name!r} have other weights than {sizes}")
        floats = {name: [tuple(map(float, part)) for part in parts] for name, parts in values.items()}
        return cls(fitted={name: RootWeights(RowWeights(*parts[0]), *parts[1:]) for name, parts in floats.items()})


def weights_name(known: str, layer: int, *, is_sampling: bool) -> str:
    """The name of one state of knowledge; the draft alone has no depth.

    >>> weights_name("draft", 0, is_sampling=False), weights_name("both", 3, is_sampling=True)
    ('draft', 'both:3:sampled')
    """
    parts = [known] if known == "draft" else [known, str(layer)]
    return ":".join([*parts, "sampled"] if is_sampling else parts)


class Root(NamedTuple):
    """The guess "exactly `row` window tokens are accepted and the next target token is `token`"."""

    row: int
    token: int
    score: float
    source: str


class ScoredCandidates(NamedTuple):
    """Candidates at every row: `ids [g+1, K]` and competing `scores [g+1, K]` (`-inf` is unknown).

    `noise [g+1, K]` is what sampling has added to the scores.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.floating]
    noise: NDArray[np.floating] | float = 0.0


class Candidates(NamedTuple):
    """Both candidate lists of every row as one: `ids [g+1, M]`, `features [g+1, M, 4]`, `is_real [g+1, M]`.

    The features are the log-share by the draft, by the exit, and the logarithm of one plus each one's rank.
    """

    ids: NDArray[np.int64]
    features: Array
    is_real: NDArray[np.bool_]


class RootChances(NamedTuple):
    """`chances [g+1, M]` that exactly `row` window tokens are accepted and `ids [g+1, M]` comes next."""

    ids: NDArray[np.int64]
    chances: Array


class RootPlanner:
    """Chooses roots for one request."""

    def __init__(self, speculation: SpeculationConfig, chooser: TokenChooser, scores: RootScores) -> None:
        self._speculation, self._chooser = speculation, chooser
        self._weights = cache(partial(scores.weights, is_sampling=chooser.is_sampling))
        self.acceptance_rate = AcceptanceRate()

    @property
    def is_early(self) -> bool:
        """Whether roots may come from the draft's own candidates."""
        return self._speculation.root_source != "proxy"

    @property
    def is_listening(self) -> bool:
        """Whether the exits' messages are used."""
        return self._speculation.root_source != "early"

    def plan(
        self, head: int, window: NDArray[np.int64], by_draft: DraftCandidates | None, by_exit: ExitGuesses | None
    ) -> list[Root]:
        """Roots for a window after the head token at position `head`, likeliest first.

        Candidates compete with the noise that the target will use at the same positions. At least one of draft and exit
        must have spoken.
        """
        draft = self._compete(head, window, *by_draft) if by_draft else None
        exit_ = self._compete(head, window, by_exit.ids, by_exit.logprobs) if by_exit else None
        known = "both" if draft and exit_ else "draft" if draft else "exit"
        layer = by_exit.layer if by_exit else 0
        found = root_chances(window, join(draft, exit_), self._weights(known, layer), self.acceptance_rate.log_odds)
        source = "exit" if by_exit else "early"
        if self._speculation.allocation == "per_row":
            return per_row_roots(found, self._speculation.kappa, source)
        return global_roots(found, self._speculation.roots, source)

    def _compete(
        self, head: int, window: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.floating]
    ) -> ScoredCandidates:
        num_rows = len(window) + 1
        positions = head + 1 + np.arange(num_rows)
        return compete(self._chooser, ids[:num_rows], logprobs[:num_rows], positions)


def compete(
    chooser: TokenChooser, ids: NDArray[np.int64], logprobs: NDArray[np.floating], positions: NDArray[np.int64]
) -> ScoredCandidates:
    """Candidates `[n, K]` with the noise that the target will use at `positions [n]`."""
    if chooser.keeps_order:
        return ScoredCandidates(ids, logprobs)
    noise = chooser.noise(ids, positions)
    return ScoredCandidates(ids, chooser.scores(logprobs, noise), noise)


def log_shares(proxies: ScoredCandidates) -> Array:
    """Log of each candidate's share of its row, `[g+1, K]`; rows of which nothing is known give zeros."""
    shares = np.array(proxies.scores, dtype=np.float64)
    shares[~np.isfinite(shares)] = 0.0
    shares -= shares.max(axis=1, keepdims=True)
    shares -= np.log(np.exp(shares).sum(axis=1, keepdims=True))
    return shares


@cache
def _log_ranks(width: int) -> Array:
    """Logarithm of one plus the rank, for ranks `0 .. width`; not to be written to."""
    return np.log1p(np.arange(width + 1))


def join(draft: ScoredCandidates | None, exit_: ScoredCandidates | None) -> Candidates:
    """Both candidate lists as one; a token that both name stands once, at the draft's place.

    Rows of which the draft knows nothing (scores `-inf`) count with the exit's shares on both sides. A token that one
    side does not name counts below the last that it names; the exit names the likeliest before noise, so there the
    token's own noise is added: a token that wins by its noise is seldom named.

    >>> draft = ScoredCandidates(np.array([[1, 2]]), np.log(np.array([[0.8, 0.2]])))
    >>> both = join(draft, ScoredCandidates(np.array([[2, 3]]), np.log(np.array([[0.5, 0.5]]))))
    >>> both.ids.tolist(), both.is_real.tolist(), np.exp(both.features[0, 1, :2]).round(2).tolist()
    ([[1, 2, 2, 3]], [[True, True, False, True]], [0.2, 0.5])
    """
    if draft is None or exit_ is None:
        return _alone(draft, exit_)
    width, width_exit = draft.ids.shape[1], exit_.ids.shape[1]
    known = np.isfinite(draft.scores[:, :1])
    by_draft, by_exit = log_shares(draft), log_shares(exit_)
    ranks, ranks_exit = _log_ranks(width), _log_ranks(width_exit)
    same = (draft.ids[:, :, None] == exit_.ids[:, None, :]) & known[:, :, None]
    has_twin, place = same.any(axis=2), same.argmax(axis=2)
    draft_floor = by_draft.min(axis=1, keepdims=True) - _MISSING
    exit_floor = (by_exit - exit_.noise).min(axis=1, keepdims=True) - _MISSING + draft.noise
    features = np.empty((len(draft.ids), width + width_exit, NUM_TOKEN_FEATURES))
    features[:, :width, 0] = by_draft
    features[:, :width, 1] = np.where(has_twin, by_exit[np.arange(len(place))[:, None], place], exit_floor)
    features[:, :width, 2] = ranks[:width]
    features[:, :width, 3] = ranks_exit[np.where(has_twin, place, width_exit)]
    features[:, width:, 0] = np.where(known, draft_floor, by_exit)
    features[:, width:, 1] = by_exit
    features[:, width:, 3] = ranks_exit[:width_exit]
    features[:, width:, 2] = np.where(known, ranks[width], ranks_exit[:width_exit])
    is_real = np.empty(features.shape[:2], dtype=np.bool_)
    is_real[:, :width], is_real[:, width:] = known, ~same.any(axis=1)
    return Candidates(np.concatenate([draft.ids, exit_.ids], axis=1), features, is_real)


def _alone(draft: ScoredCandidates | None, exit_: ScoredCandidates | None) -> Candidates:
    only = draft if draft is not None else exit_
    assert only is not None
    features = np.zeros((*only.ids.shape, NUM_TOKEN_FEATURES))
    side = 0 if draft is not None else 1
    features[:, :, side] = log_shares(only)
    features[:, :, side + 2] = _log_ranks(only.ids.shape[1])[:-1]
    return Candidates(only.ids, features, np.isfinite(only.scores))


def row_features(window: NDArray[np.int64], candidates: Candidates, rate_log_odds: float) -> Array:
    """What the rows before each window token say about it, `[g, 7]`.

    One; the token's log-share by draft and exit; the log-share of the best other candidate by each; the row (in tens);
    the log-odds of the running acceptance rate.
    """
    num_rows = len(window)
    ids, shares = candidates.ids[:num_rows], candidates.features[:num_rows, :, :2]
    real = candidates.is_real[:num_rows]
    is_own = (ids == window[:, None]) & real
    floor = shares.min(axis=1) - _MISSING
    features = np.ones((num_rows, NUM_ROW_FEATURES))
    rows, places = np.arange(num_rows), is_own.argmax(axis=1)
    features[:, 1:3] = np.where(is_own[rows, places, None], shares[rows, places], floor)
    others = np.where((real & ~is_own)[:, :, None], shares, -np.inf).max(axis=1)
    features[:, 3:5] = np.where(np.isfinite(others), others, 0.0)
    features[:, 5] = rows / 10
    features[:, 6] = rate_log_odds
    return features


def token_chances(features: Array, is_allowed: NDArray[np.bool_], weights: tuple[float, ...]) -> Array:
    """Share of each candidate of a row, `[..., M]`, among those allowed."""
    scores = np.where(is_allowed, features @ np.asarray(weights), -np.inf)
    best = scores.max(axis=-1, keepdims=True)
    shares = np.exp(scores - np.where(np.isfinite(best), best, 0.0))
    total: Array = shares / np.maximum(shares.sum(axis=-1, keepdims=True), 1e-300)
    return total


def root_chances(
    window: NDArray[np.int64], candidates: Candidates, weights: RootWeights, rate_log_odds: float
) -> RootChances:
    """The chance of every root.

    Row `i` is reached with the product of the rows' acceptance chances before it and fails with one less its own; the
    last row cannot fail. There the token is chosen among all candidates, elsewhere among those that are not the
    window's own token, which a correction can never be.

    One window token 5, all but certain by the draft, then 9 by the draft: the bonus (1, 9) is the likeliest root.

    >>> draft = ScoredCandidates(np.array([[5, 6], [9, 3]]), np.log(np.array([[0.999, 0.001], [0.99, 0.01]])))
    >>> found = root_chances(np.array([5]), join(draft, None), DEFAULTS["draft"], 1.4)
    >>> [int(x) for x in np.unravel_index(found.chances.argmax(), (2, 2))], float(found.chances[0, 0])
    ([1, 0], 0.0)
    """
    num_window = len(window)
    log_odds = row_features(window, candidates, rate_log_odds) @ np.asarray(weights.accept)
    accept = (1.0 + np.tanh(log_odds / 2)) / 2  # the logistic function, which no odds overflow
    reach = np.ones(num_window + 1)
    np.cumprod(accept, out=reach[1:])
    reach[:num_window] *= 1.0 - accept
    features, real, ids = candidates.features, candidates.is_real, candidates.ids
    is_correction = real[:num_window] & (ids[:num_window] != window[:, None])
    chances = np.empty(ids.shape)
    chances[:num_window] = token_chances(features[:num_window], is_correction, weights.correction)
    chances[num_window:] = token_chances(features[num_window:], real[num_window:], weights.bonus)
    return RootChances(ids, reach[:, None] * chances)


def per_row_roots(found: RootChances, kappa: int, source: str = "exit") -> list[Root]:
    """The best `kappa` candidates of every row, likeliest first (Mirror-SD, section 3).

    >>> found = RootChances(np.array([[6, 7], [9, 3]]), np.array([[0.2, 0.1], [0.6, 0.1]]))
    >>> [(root.row, root.token) for root in per_row_roots(found, 1)]
    [(1, 9), (0, 6)]
    """
    order = np.argsort(-found.chances, axis=1, kind="stable")[:, :kappa]
    kept = np.zeros_like(found.chances)
    np.put_along_axis(kept, order, np.take_along_axis(found.chances, order, axis=1), axis=1)
    return global_roots(RootChances(found.ids, kept), kept.size, source)


def global_roots(found: RootChances, budget: int, source: str = "exit") -> list[Root]:
    """The best `budget` roots over all rows, likeliest first.

    >>> found = RootChances(np.array([[6, 7], [9, 3]]), np.array([[0.2, 0.1], [0.6, 0.0]]))
    >>> [(root.row, root.token) for root in global_roots(found, 8)]
    [(1, 9), (0, 6), (0, 7)]
    """
    best = np.argsort(-found.chances, axis=None, kind="stable")[:budget]
    rows = best // found.chances.shape[1]
    chances, ids = found.chances.ravel()[best], found.ids.ravel()[best]
    return [
        Root(row, token, chance, source)
        for row, token, chance in zip(rows.tolist(), ids.tolist(), chances.tolist(), strict=True)
        if chance > 0
    ]
