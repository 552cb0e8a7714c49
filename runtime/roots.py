"""Which (row, next token) guesses deserve a branch: the root budget, spent on the chances that `root_scores` gives."""

from typing import NamedTuple

import numpy as np

from mirrorsd.runtime.root_scores import RootChances


class Root(NamedTuple):
    """The guess "exactly `row` window tokens are accepted and the next target token is `token`"."""

    row: int
    token: int
    score: float
    source: str


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
