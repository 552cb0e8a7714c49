"""Root chances and allocation: the banned token, a check by hand; chances move as what is known moves."""

import numpy as np
import pytest

from mirrorsd.runtime.ledger import AcceptanceRate
from mirrorsd.runtime.policy.roots import (
    DEFAULTS,
    Candidates,
    RootScores,
    ScoredCandidates,
    global_roots,
    join,
    log_shares,
    per_row_roots,
    root_chances,
    token_chances,
    weights_name,
)

WINDOW = np.array([5, 7])
IDS = np.array([[5, 6, 8], [7, 9, 4], [2, 3, 1]])
SCORES = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.55, 0.33, 0.12]]))
DRAFT = ScoredCandidates(IDS, SCORES)
EXIT = ScoredCandidates(np.array([[5, 8, 11], [9, 7, 12], [2, 14, 1]]), np.log(np.array([[0.6, 0.3, 0.1]] * 3)))
KNOWN = {"draft": join(DRAFT, None), "exit": join(None, EXIT), "both": join(DRAFT, EXIT)}


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_window_tokens_are_never_corrections(known: str) -> None:
    found = root_chances(WINDOW, KNOWN[known], DEFAULTS[known], 0.4)
    for roots in (per_row_roots(found, 3), global_roots(found, 20)):
        assert not {(root.row, root.token) for root in roots} & {(0, 5), (1, 7)}
        assert (2, 2) in {(root.row, root.token) for root in roots}
        assert len({(root.row, root.token) for root in roots}) == len(roots)
        assert [root.score for root in roots] == sorted((root.score for root in roots), reverse=True)


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_chances_of_all_roots_sum_to_one(known: str) -> None:
    found = root_chances(WINDOW, KNOWN[known], DEFAULTS[known], 0.4)
    assert found.chances.sum() == pytest.approx(1.0)


def test_per_row_takes_kappa_of_every_row() -> None:
    found = root_chances(WINDOW, KNOWN["draft"], DEFAULTS["draft"], 0.4)
    assert sorted((root.row, root.token) for root in per_row_roots(found, 1)) == [(0, 6), (1, 9), (2, 2)]


def test_chances_match_the_models_by_hand() -> None:
    weights = DEFAULTS["draft"]
    shares = np.log([[0.7, 0.2], [0.5, 0.3]])
    accept = []
    for row, (own, other) in enumerate(shares):
        features = [1, own, 0, other, 0, row / 10, 0.4]
        accept.append(1 / (1 + np.exp(-np.dot(features, weights.accept))))
    sharpness = weights.correction[0]
    correction = accept[0] * (1 - accept[1]) * 0.3**sharpness / (0.3**sharpness + 0.2**sharpness)
    found = root_chances(WINDOW, KNOWN["draft"], weights, 0.4)
    assert found.chances[1, 1] == pytest.approx(correction)
    assert found.chances[2].sum() == pytest.approx(accept[0] * accept[1])


def test_rows_unknown_to_the_draft_count_with_the_exit_alone() -> None:
    unknown = ScoredCandidates(IDS, np.full(IDS.shape, -np.inf))
    found = root_chances(WINDOW, join(unknown, EXIT), DEFAULTS["both"], 0.4)
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
    found = root_chances(np.empty(0, int), join(ScoredCandidates(IDS[:1], SCORES[:1]), None), DEFAULTS["draft"], 0.0)
    assert [(root.row, root.token) for root in global_roots(found, 2)] == [(0, 5), (0, 6)]


def candidates(known: str, own_share: float = 0.7) -> Candidates:
    """The window's first token has this share of its row, its rivals two and one thirds of what is left."""
    rest = 1 - own_share
    shares = np.array([[own_share, rest * 2 / 3, rest / 3], [0.6, 0.3, 0.1], [0.5, 0.3, 0.2]])
    named = ScoredCandidates(IDS, np.log(shares))
    return join(named if known != "exit" else None, named if known != "draft" else None)


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_the_surer_a_window_token_the_less_likely_is_its_correction(known: str) -> None:
    corrections = [
        root_chances(WINDOW, candidates(known, own_share), DEFAULTS[known], 0.4).chances[0].sum()
        for own_share in (0.4, 0.6, 0.8, 0.95)
    ]
    assert corrections == sorted(corrections, reverse=True)
    assert corrections[0] > 2 * corrections[-1]


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_the_more_was_right_lately_the_likelier_is_the_whole_window(known: str) -> None:
    bonuses = [
        root_chances(WINDOW, candidates(known), DEFAULTS[known], rate).chances[2].sum() for rate in (-2.0, 0.0, 2.0)
    ]
    assert bonuses == sorted(bonuses)
    assert bonuses[-1] > 2 * bonuses[0]


@pytest.mark.parametrize("known", ["draft", "exit", "both"])
def test_of_two_corrections_the_one_with_the_larger_share_is_likelier(known: str) -> None:
    found = root_chances(WINDOW, candidates(known), DEFAULTS[known], 0.4)
    for row, likelier, other in ((0, 6, 8), (1, 9, 4), (2, 2, 3)):
        by_token = dict(zip(found.ids[row].tolist()[:3], found.chances[row].tolist()[:3], strict=True))
        assert by_token[likelier] > by_token[other] > 0


def test_an_acceptance_rate_of_nought_or_one_is_no_certainty() -> None:
    for is_right in (0, 1):
        rate = AcceptanceRate()
        for _ in range(1000):
            rate.observe(1, is_right)
        found = root_chances(WINDOW, candidates("draft"), DEFAULTS["draft"], rate.log_odds)
        assert found.chances.sum() == pytest.approx(1.0)
        assert (found.chances.sum(axis=1) > 0).all()


def test_a_token_that_draft_and_exit_name_counts_once_with_both_shares() -> None:
    draft, exit_ = (
        ScoredCandidates(np.array([[1, 2]]), np.log([[0.8, 0.2]])),
        ScoredCandidates(np.array([[2, 3]]), np.log([[0.6, 0.4]])),
    )
    both = join(draft, exit_)
    real = {
        token: np.exp(features[:2]).round(3).tolist()
        for token, features, is_real in zip(both.ids[0].tolist(), both.features[0], both.is_real[0], strict=True)
        if is_real
    }
    assert both.is_real.sum() == len(real) == 3
    assert real[2] == [0.2, 0.6]
    assert real[1][0] == 0.8
    assert real[1][1] < 0.4, "what the exit leaves out is less likely than what it names"


def test_shares_of_a_row_sum_to_one_whatever_was_added_to_all() -> None:
    scores = np.log([[0.5, 0.25, 0.25]]) + 7.0
    assert np.exp(log_shares(ScoredCandidates(IDS[:1], scores))).round(6).tolist() == [[0.5, 0.25, 0.25]]


def test_a_row_without_an_allowed_token_has_no_chance_and_no_warning() -> None:
    chances = token_chances(np.ones((2, 3, 4)), np.array([[True, True, False], [False] * 3]), (1.0, 0.0, 0.0, 0.0))
    assert chances.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_scores_survive_their_file() -> None:
    scores = RootScores(fitted={"both:3:sampled": DEFAULTS["both"]})
    again = RootScores.from_dict(scores.to_dict())
    assert again.weights("both", 3, is_sampling=True) == DEFAULTS["both"]
    assert again.weights("both", 4, is_sampling=True) == DEFAULTS["both"], "another depth has the defaults"
    with pytest.raises(ValueError, match="both:3"):
        RootScores.from_dict({"both:3": [[1.0], [1.0], [1.0]]})


def test_fitted_weights_serve_their_own_kind_of_text_and_depth_only() -> None:
    fitted = DEFAULTS["both"]._replace(bonus=(1.0, 2.0, 3.0, 4.0))
    scores = RootScores(fitted={weights_name("both", 3, is_sampling=True): fitted})
    assert scores.weights("both", 3, is_sampling=True) == fitted
    for known, layer, is_sampling in (("both", 3, False), ("both", 4, True), ("exit", 3, True), ("draft", 0, True)):
        assert scores.weights(known, layer, is_sampling=is_sampling) == DEFAULTS[known]


@pytest.mark.parametrize("name", ["window", "drafts:3"])
def test_a_file_that_names_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RootScores.from_dict({name: [list(part) for part in DEFAULTS["draft"]]})


@pytest.mark.parametrize("log_share", [-1e3, -1e5, -1e30])
def test_a_hopeless_window_has_no_chance_and_warns_nobody(log_share: float) -> None:
    """At a low temperature a draft's second choice is hopeless: a float cannot hold the odds against it."""
    scores = np.array([[log_share, 0.0, log_share], [0.0, log_share, log_share], [0.0, -1.0, -2.0]])
    found = root_chances(WINDOW, join(ScoredCandidates(IDS, scores), None), DEFAULTS["draft"], 0.4)
    assert np.isfinite(found.chances).all()
    assert found.chances[0].sum() == pytest.approx(1.0), "the first token of the window fails"
