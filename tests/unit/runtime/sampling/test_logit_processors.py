"""Penalties and filters: the target's own against transformers, and what draft and exits are told of them."""

import numpy as np
import pytest

from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.sampling.filters import kept_tokens
from mirrorsd.runtime.sampling.logit_processors import Penalties, ShortlistFilter, penalise_repetition
from mirrorsd.texts.config import GenerationConfig

RNG = np.random.default_rng(12)
AT = np.array([4])


def test_repetition_penalty_matches_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    scores, history = RNG.normal(size=50), np.array([3, 7, 7, 20])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(history)[None], torch.tensor(scores)[None])[0].numpy()
    np.testing.assert_allclose(penalise_repetition(scores.copy(), history, 1.3), expected)


def test_tokens_of_the_text_are_handicapped_by_less_than_the_best_loses() -> None:
    penalty = Penalties(GenerationConfig(repetition_penalty=1.25))
    penalty.apply(np.array([10.0, 2.0, 1.0]), np.array([0]))
    penalty.apply(np.array([10.0, 2.0, 1.0]), np.array([0, 1]))
    told = penalty.handicap(np.array([[0, 2], [1, 1]]))
    assert told[0, 1] == 0
    assert 0 < told[0, 0] < 2.0  # 10 becomes 8
    assert (told[1] == told[0, 0]).all()
    assert penalty.handicaps(3).tolist() == [told[0, 0], told[0, 0], 0.0]


@pytest.mark.parametrize("best", [-3.0, 0.0])
def test_negative_logits_are_weakened_too(best: float) -> None:
    penalty = Penalties(GenerationConfig(repetition_penalty=2.0))
    penalty.apply(np.array([best, -9.0]), np.array([0]))
    assert penalty.handicaps(2)[0] >= 0


def test_nothing_is_known_before_the_first_choice() -> None:
    penalty = Penalties(GenerationConfig(repetition_penalty=1.5))
    assert penalty.handicap(np.array([[5, 6]])).tolist() == [[0.0, 0.0]]
    assert penalty.handicaps(3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9}])
def test_a_candidate_of_the_text_gives_way_to_a_new_one(sampling: dict[str, float]) -> None:
    """As the target's own choice does; without a penalty the draft's best stays best."""
    logits, logprobs, ids = np.array([20.0, 19.5, -60.0]), np.log([[0.62, 0.38]]), np.array([[0, 1]])
    for penalty, expected in ((1.0, 0), (1.5, 1)):
        chooser = TokenChooser(GenerationConfig(repetition_penalty=penalty, seed=2, **sampling))  # type: ignore[arg-type]
        chosen = chooser.choose(logits, 4, np.array([0, 2]))
        source = chooser.noise_source()
        if penalty == 1.0:
            noisy = np.log([0.62, 0.38]) if source is None else np.log([0.62, 0.38]) + source(4, 3)[:2]
            ranked = chooser.rank(ids, logprobs, AT)[0]
            assert ranked.argmax() == noisy.argmax() == chosen.token == expected
        else:
            assert source is not None
            ranked = chooser.rank(ids, logprobs, AT)[0]
            assert ranked.argmax() == (logprobs[0] + source(4, 3)[:2]).argmax() == expected
            assert chosen.token == expected


def test_presence_and_frequency_count_new_tokens_alone() -> None:
    penalties = Penalties(GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25), num_prompt=2)
    assert penalties.apply(np.zeros(4), np.array([0, 1, 1, 2, 2])).tolist() == [0.0, -0.75, -1.0, 0.0]
    assert penalties.handicaps(4).tolist() == [0.0, 0.75, 1.0, 0.0]
    assert penalties.handicap(np.array([[2, 0]])).tolist() == [[1.0, 0.0]]


def test_the_bias_comes_before_the_penalties() -> None:
    """A logit of -1 that is biased to 2 is positive: the repetition penalty divides it."""
    penalties = Penalties(GenerationConfig(logit_bias={1: 3.0}, repetition_penalty=2.0))
    assert penalties.apply(np.array([0.0, -1.0]), np.array([1])).tolist() == [0.0, 1.0]
    assert penalties.handicap(np.array([[0, 1]]))[0, 1] < 0


def test_a_bias_alone_needs_no_history() -> None:
    penalties = Penalties(GenerationConfig(logit_bias={1: 3.0}))
    assert (penalties.is_wanted, penalties.needs_history) == (True, False)
    assert penalties.apply(np.array([0.0, -1.0]), None).tolist() == [0.0, 2.0]
    assert penalties.handicaps(2).tolist() == [0.0, -3.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (5, 1.0, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.05)])
def test_sixteen_candidates_of_a_thousand_are_filtered_almost_as_all_are(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Exactly where the probability outside the list does not count, closely where it is estimated."""
    filters, num_wrong, random = ShortlistFilter(temperature, top_k, top_p, min_p), 0, np.random.default_rng(5)
    for _ in range(40):
        logits = random.normal(scale=3.0, size=1000)
        logprobs = logits - np.log(np.exp(logits).sum())
        ids = np.argsort(-logprobs)[:16]
        kept = kept_tokens(logprobs, float(logprobs.max()), filters)
        assert kept is not None
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
