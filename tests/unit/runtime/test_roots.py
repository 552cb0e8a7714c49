"""Root allocation: the worked examples, the banned token, and a brute-force check of the formula."""

import numpy as np
import pytest

from mirrorsd.runtime.roots import Proxies, candidate_probabilities, global_roots, per_row_roots

WINDOW = np.array([5, 7])
IDS = np.array([[5, 6, 8], [7, 9, 4], [2, 3, 1]])
SCORES = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.55, 0.33, 0.12]]))
PROXIES = Proxies(IDS, SCORES)


def test_window_tokens_are_never_corrections() -> None:
    for roots in (per_row_roots(WINDOW, PROXIES, 3), global_roots(WINDOW, PROXIES, 20, 0.5)):
        assert not {(root.row, root.token) for root in roots} & {(0, 5), (1, 7)}
        assert (2, 2) in {(root.row, root.token) for root in roots}


def test_per_row_takes_kappa_of_every_row() -> None:
    roots = per_row_roots(WINDOW, PROXIES, 1)
    assert sorted((root.row, root.token) for root in roots) == [(0, 6), (1, 9), (2, 2)]


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.95])
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_global_scores_match_the_formula(rate: float, budget: int) -> None:
    alpha = [0.75 * 0.7 + 0.25 * rate, 0.75 * 0.5 + 0.25 * rate]
    expected = []
    for row in range(3):
        reach = np.prod(alpha[:row])
        fail = 1 - alpha[row] if row < 2 else 1.0
        window_share = {0: 0.7, 1: 0.5, 2: 0.0}[row]
        for token, probability in zip(IDS[row], np.exp(SCORES[row]), strict=True):
            if row == 2 or token != WINDOW[row]:
                expected.append((reach * fail * probability / (1 - window_share), row, int(token)))
    best = sorted(expected, reverse=True)[:budget]
    found = global_roots(WINDOW, PROXIES, budget, rate)
    assert [(root.row, root.token) for root in found] == [(row, token) for _, row, token in best]
    np.testing.assert_allclose([root.score for root in found], [score for score, _, _ in best])


def test_probabilities_sum_to_one() -> None:
    np.testing.assert_allclose(candidate_probabilities(PROXIES).sum(axis=-1), 1.0)


def test_empty_window_has_only_the_bonus_row() -> None:
    proxies = Proxies(IDS[:1], SCORES[:1])
    assert [(root.row, root.token) for root in global_roots(np.empty(0, int), proxies, 2, 0.5)] == [(0, 5), (0, 6)]
