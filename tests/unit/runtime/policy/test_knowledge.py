"""Weights of roots are found by what is known, how deep, and by kind of text."""

import pytest

from mirrorsd.runtime.policy.knowledge import DEFAULTS, RootScores, key


def test_scores_survive_their_file() -> None:
    scores = RootScores(fitted={"both:3:sampled": DEFAULTS["both"]})
    again = RootScores.from_dict(scores.to_dict())
    assert again.weights("both", 3, is_sampling=True) == DEFAULTS["both"]
    assert again.weights("both", 4, is_sampling=True) == DEFAULTS["both"], "another depth has the defaults"
    with pytest.raises(ValueError, match="both:3"):
        RootScores.from_dict({"both:3": [[1.0], [1.0], [1.0]]})


def test_fitted_weights_serve_their_own_kind_of_text_and_depth_only() -> None:
    fitted = DEFAULTS["both"]._replace(bonus=(1.0, 2.0, 3.0, 4.0))
    scores = RootScores(fitted={key("both", 3, is_sampling=True): fitted})
    assert scores.weights("both", 3, is_sampling=True) == fitted
    for known, layer, is_sampling in (("both", 3, False), ("both", 4, True), ("exit", 3, True), ("draft", 0, True)):
        assert scores.weights(known, layer, is_sampling=is_sampling) == DEFAULTS[known]


@pytest.mark.parametrize("name", ["window", "drafts:3"])
def test_a_file_that_names_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RootScores.from_dict({name: [list(part) for part in DEFAULTS["draft"]]})
