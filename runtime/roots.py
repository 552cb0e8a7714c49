"""Which (row, next token) guesses deserve a branch: allocation of the root budget from the exit's proxies."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FLOOR = 1e-4


class Root(NamedTuple):
    """The guess "exactly `row` window tokens are accepted and the next target token is `token`"."""

    row: int
    token: int
    score: float
    source: str


class Proxies(NamedTuple):
    """The exit's candidates at every row: `ids [g+1, K]` and competing `scores [g+1, K]` (noise included)."""

    ids: NDArray[np.int64]
    scores: NDArray[np.floating]


def candidate_probabilities(proxies: Proxies) -> NDArray[np.float64]:
    """The share of each candidate in its row, `[g+1, K]`: softmax of the competing scores; 0 where nothing is known."""
    best = proxies.scores.max(axis=-1, keepdims=True)
    shifted = proxies.scores - np.where(np.isfinite(best), best, 0.0)
    weights = np.exp(shifted.astype(np.float64))
    probabilities: NDArray[np.float64] = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return probabilities


def combine_proxies(draft: Proxies, exit_: Proxies) -> Proxies:
    """Both candidate lists as one: each candidate scores the mean of what draft and exit give it.

    A candidate that only one of them names gets the other's lowest score at that row, less one. Rows of which the draft
    knows nothing (score `-inf`) count with the exit's scores alone.

    >>> draft = Proxies(np.array([[1, 2]]), np.array([[-1.0, -2.0]]))
    >>> both = combine_proxies(draft, Proxies(np.array([[2, 3]]), np.array([[-1.0, -4.0]])))
    >>> both.ids.tolist(), both.scores.tolist()
    ([[1, 2, 2, 3]], [[-3.0, -1.5, -inf, -3.5]])
    """
    same = draft.ids[:, :, None] == exit_.ids[:, None, :]
    known = np.isfinite(draft.scores[:, :1])
    draft_scores = np.where(known, draft.scores, 0.0).astype(np.float64)
    draft_floor = draft_scores.min(axis=1, keepdims=True) - 1.0
    exit_floor = exit_.scores.min(axis=1, keepdims=True) - 1.0
    exit_of_draft = np.where(same, exit_.scores[:, None, :], -np.inf).max(axis=2)
    exit_of_draft = np.maximum(exit_of_draft, exit_floor)
    first = np.where(known, (draft_scores + exit_of_draft) / 2, -np.inf)
    second = np.where(known, (draft_floor + exit_.scores) / 2, exit_.scores)
    second = np.where(same.any(axis=1) & known, -np.inf, second)
    return Proxies(np.concatenate([draft.ids, exit_.ids], axis=1), np.concatenate([first, second], axis=1))


def per_row_roots(window: NDArray[np.int64], proxies: Proxies, kappa: int, source: str = "exit") -> list[Root]:
    """The best `kappa` candidates of every row, the window's own next token left out (Mirror-SD, section 3)."""
    roots: list[Root] = []
    probabilities = candidate_probabilities(proxies)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    for row in range(len(window) + 1):
        banned = int(window[row]) if row < len(window) else -1
        ranked = [k for k in order[row] if proxies.ids[row, k] != banned and probabilities[row, k] > 0][:kappa]
        roots += [Root(row, int(proxies.ids[row, k]), float(probabilities[row, k]), source) for k in ranked]
    roots.sort(key=lambda root: -root.score)
    return roots


def global_roots(
    window: NDArray[np.int64], proxies: Proxies, budget: int, acceptance_rate: float, source: str = "exit"
) -> list[Root]:
    """The best `budget` roots over all rows (ALGORITHM.md, "Which roots").

    With `e_i` the exit's probabilities at row `i`: `alpha_i = 0.75 e_{i-1}(w_i) + 0.25 acceptance_rate`,
    `h_i = alpha_1 .. alpha_i (1 - alpha_{i+1})`, `h_g` the product of all; a root scores
    `h_i e_i(v) / (1 - e_i(w_{i+1}))`.

    One window token 5 that the exit gives 0.8 (6 gets 0.2), bonus row certain of 9, running rate 0.8: failing at row 0
    has `h_0 = 0.2`, all of it on token 6; the bonus has `h_1 = 0.8`.

    >>> ids = np.array([[5, 6], [9, 3]])
    >>> scores = np.log(np.array([[0.8, 0.2], [0.999999, 0.000001]]))
    >>> [(r.row, r.token, round(r.score, 2)) for r in global_roots(np.array([5]), Proxies(ids, scores), 2, 0.8)]
    [(1, 9, 0.8), (0, 6, 0.2)]
    """
    probabilities = candidate_probabilities(proxies)
    num_rows = len(window) + 1
    next_tokens = np.append(window, -1)
    is_window_token = proxies.ids[:num_rows] == next_tokens[:, None]
    chance_of_window = (probabilities[:num_rows] * is_window_token).sum(axis=-1)
    alpha = 0.75 * chance_of_window[:-1] + 0.25 * acceptance_rate
    reach = np.concatenate([[1.0], np.cumprod(alpha)])
    fail = np.append(1.0 - alpha, 1.0)
    weight = reach * fail / np.maximum(1.0 - chance_of_window, _FLOOR)
    scores = np.where(is_window_token, -1.0, weight[:, None] * probabilities[:num_rows])
    best = np.argsort(-scores, axis=None, kind="stable")[:budget]
    rows, columns = np.unravel_index(best, scores.shape)
    return [
        Root(int(row), int(proxies.ids[row, k]), float(scores[row, k]), source)
        for row, k in zip(rows, columns, strict=True)
        if scores[row, k] > 0
    ]
