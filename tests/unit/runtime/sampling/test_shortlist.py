"""What the target's filters will probably drop of a shortlist."""

import numpy as np
import pytest

from mirrorsd.runtime.sampling.likely_tokens import likely_tokens, new_scratch
from mirrorsd.runtime.sampling.shortlist import ShortlistFilter

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (5, 1.0, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.05)])
def test_sixteen_candidates_of_a_thousand_are_filtered_almost_as_all_are(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Exactly where the probability outside the list does not count, closely where it is estimated."""
    filters, num_wrong = ShortlistFilter(temperature, top_k, top_p, min_p), 0
    for _ in range(40):
        logits = RNG.normal(scale=3.0, size=1000)
        logprobs = logits - np.log(np.exp(logits).sum())
        ids = np.argsort(-logprobs)[:16]
        likely = likely_tokens(logprobs, float(logprobs.max()), filters, new_scratch(1000))
        places = [place for place in range(len(likely.logits)) if likely.keeps(place)]
        kept = places if likely.ids is None else likely.ids[places]
        num_wrong += int((filters.dropped(logprobs[ids]) == np.isin(ids, kept)).sum())
    is_exact = 0 < top_k <= 16 or top_p >= 1 or (temperature == 1 and not top_k)
    assert num_wrong <= (0 if is_exact else 16)  # of 640


def test_without_filters_everything_is_kept() -> None:
    assert ShortlistFilter(0.7, 0, 1.0, 0.0).keeps_all
    assert not ShortlistFilter(0.7, 0, 1.0, 0.1).keeps_all


def test_rows_of_which_nothing_is_known_drop_nothing() -> None:
    with np.errstate(all="raise"):
        fallen = ShortlistFilter(0.7, 5, 0.8, 0.1).dropped(np.full((2, 3, 4), -np.inf))
    assert not fallen.any()


def test_hardly_any_temperature_keeps_the_best_and_overflows_nowhere() -> None:
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        fallen = ShortlistFilter(1e-3, 0, 0.9, 0.0).dropped(np.log(np.array([[0.5, 0.3, 0.2], [1.0, 1e-9, 1e-30]])))
    assert fallen.tolist() == [[False, True, True]] * 2
