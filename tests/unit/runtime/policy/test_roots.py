"""Root chances and allocation: the worked examples, the banned token, a check by hand, and what fitting brings."""

import numpy as np
import pytest

from mirrorsd.runtime.policy.root_scores import DEFAULTS, RootScores, ScoredCandidates, join, root_chances
from mirrorsd.runtime.policy.roots import global_roots, per_row_roots

WINDOW = np.array([5, 7])
IDS = np.array([[5, 6, 8], [7, 9, 4], [2, 3, 1]])
SCORES = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.55, 0.33, 0.12]]))
DRAFT = ScoredCandidates(IDS, SCORES)
EXIT = ScoredCandidates(np.array([[5, 8, 11], [9, 7, 12], [2, 14, 1]]), np.log(np.array([[0.6, 0.3, 0.1]] * 3)))
KNOWN = {"draft": join(DRAFT, None), "exit": join(None, EXIT), "both": join(DRAFT, EXIT)}


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_window_tokens_are_never_corrections(known: str) -> None:
    found = root_chances(WINDOW, KNOWN[known], DEFAULTS[known], 0.6)
    for roots in (per_row_roots(found, 3), global_roots(found, 20)):
        assert not {(root.row, root.token) for root in roots} & {(0, 5), (1, 7)}
        assert (2, 2) in {(root.row, root.token) for root in roots}
        assert len({(root.row, root.token) for root in roots}) == len(roots)
        assert [root.score for root in roots] == sorted((root.score for root in roots), reverse=True)


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_chances_of_all_roots_sum_to_one(known: str) -> None:
    found = root_chances(WINDOW, KNOWN[known], DEFAULTS[known], 0.6)
    assert found.chances.sum() == pytest.approx(1.0)


def test_per_row_takes_kappa_of_every_row() -> None:
    found = root_chances(WINDOW, KNOWN["draft"], DEFAULTS["draft"], 0.6)
    assert sorted((root.row, root.token) for root in per_row_roots(found, 1)) == [(0, 6), (1, 9), (2, 2)]


def test_chances_match_the_models_by_hand() -> None:
    weights = DEFAULTS["draft"]
    shares = np.log([[0.7, 0.2], [0.5, 0.3]])
    accept = []
    for row, (own, other) in enumerate(shares):
        features = [1, own, 0, other, 0, row / 10, np.log(0.6 / 0.4)]
        accept.append(1 / (1 + np.exp(-np.dot(features, weights.accept))))
    sharpness = weights.correction[0]
    correction = accept[0] * (1 - accept[1]) * 0.3**sharpness / (0.3**sharpness + 0.2**sharpness)
    found = root_chances(WINDOW, KNOWN["draft"], weights, 0.6)
    assert found.chances[1, 1] == pytest.approx(correction)
    assert found.chances[2].sum() == pytest.approx(accept[0] * accept[1])


def test_rows_unknown_to_the_draft_count_with_the_exit_alone() -> None:
    unknown = ScoredCandidates(IDS, np.full(IDS.shape, -np.inf))
    found = root_chances(WINDOW, join(unknown, EXIT), DEFAULTS["both"], 0.6)
    named = {(root.row, root.token) for root in global_roots(found, 50)}
    assert named == {(0, 8), (0, 11), (1, 9), (1, 12), (2, 2), (2, 14), (2, 1)}
    assert found.chances.sum() == pytest.approx(1.0)


def test_a_token_that_only_the_draft_names_keeps_its_noise_beside_the_exit_s() -> None:
    """By the exit, 4 is at best one below 8, its last without noise; noise of 5 still makes it the first."""
    draft = ScoredCandidates(np.array([[4, 7]]), np.array([[5 + np.log(0.1), np.log(0.9)]]), np.array([[5.0, 0.0]]))
    exit_ = ScoredCandidates(np.array([[7, 8]]), np.log([[0.8, 0.2]]), np.zeros((1, 2)))
    both = join(draft, exit_)
    by_exit = dict(zip(both.ids[0].tolist(), both.features[0, :, 1].tolist(), strict=True))
    assert by_exit[4] == pytest.approx(np.log(0.2) - 1 + 5)
    assert by_exit[7] == pytest.approx(np.log(0.8))


def test_empty_window_has_only_the_bonus_row() -> None:
    found = root_chances(np.empty(0, int), join(ScoredCandidates(IDS[:1], SCORES[:1]), None), DEFAULTS["draft"], 0.5)
    assert [(root.row, root.token) for root in global_roots(found, 2)] == [(0, 5), (0, 6)]


def test_scores_survive_their_file() -> None:
    scores = RootScores(fitted={"both:3:sampled": DEFAULTS["both"]})
    again = RootScores.from_dict(scores.to_dict())
    assert again.weights("both", 3, is_sampling=True) == DEFAULTS["both"]
    assert again.weights("both", 4, is_sampling=True) == DEFAULTS["both"], "another depth has the defaults"
    with pytest.raises(ValueError, match="both:3"):
        RootScores.from_dict({"both:3": [[1.0], [1.0], [1.0]]})
