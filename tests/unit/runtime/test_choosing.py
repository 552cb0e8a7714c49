"""The target's choice: filters against transformers, noise against its law, ranking against choosing."""

import numpy as np
import pytest

from mirrorsd.runtime.choosing import TokenChooser, keep_likeliest
from mirrorsd.runtime.generation_config import GenerationConfig
from mirrorsd.runtime.noise import gumbel, gumbel_row

RNG = np.random.default_rng(11)
FIRST_NOISE = [
    [0.6763963421690941, -0.8114661256308627],
    [3.2944879758593824, -0.40909420556214665],
    [0.21949738294319768, 0.45144150896157176],
]


@pytest.mark.parametrize("vocab", [30, 3000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.05), (20, 0.8, 0.02), (0, 0.95, 0.1), (1, 1.0, 0.0)],
)
def test_filters_keep_what_transformers_keeps(vocab: int, top_k: int, top_p: float, min_p: float) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = RNG.normal(scale=2.0, size=vocab)
    filtered = torch.tensor(scores)[None]
    if top_k:
        filtered = TopKLogitsWarper(top_k)(None, filtered)
    if top_p < 1:
        filtered = TopPLogitsWarper(top_p)(None, filtered)
    if min_p:
        filtered = MinPLogitsWarper(min_p)(None, filtered)
    expected = set(np.flatnonzero(np.isfinite(filtered.numpy()[0])).tolist())
    tokens, kept = keep_likeliest(scores.copy(), top_k, top_p, min_p)
    assert set(tokens.tolist()) == expected
    assert (kept == scores[tokens]).all()


def test_noise_depends_on_seed_position_and_token_only() -> None:
    tokens = np.arange(1000)
    whole = gumbel(5, np.array([17]), tokens)
    assert (gumbel(5, np.array([17]), tokens[300:310]) == whole[300:310]).all()
    grid = gumbel(5, np.array([[16], [17]]), tokens[None, :])
    assert (grid[1] == whole).all()
    assert not np.isclose(gumbel(6, np.array([17]), tokens), whole).any()
    assert not np.isclose(grid[0], whole).any()


def test_noise_of_a_whole_row_is_the_noise_of_its_tokens() -> None:
    tokens = np.arange(20_000)
    assert (gumbel_row(5, 17, tokens.size) == gumbel(5, np.array([17]), tokens)).all()


def test_noise_never_changes() -> None:
    """A seed stands for a text: another noise would be another text. Values of the first release."""
    values = gumbel(5, np.array([[0], [17], [100_000]]), np.array([0, 151_000]))
    np.testing.assert_allclose(values, FIRST_NOISE, rtol=1e-12)


def test_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov over 200,000 variates, and no correlation between neighbours in position or token."""
    noise = gumbel(3, np.arange(200)[:, None], np.arange(1000)[None, :])
    values = np.sort(noise.ravel())
    distance = np.abs(np.exp(-np.exp(-values)) - np.arange(1, values.size + 1) / values.size).max()
    assert distance < 1.63 / np.sqrt(values.size)
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.01


def test_noise_drawn_ahead_is_the_noise_drawn_on_demand() -> None:
    logits = RNG.normal(size=200).astype(np.float32)
    config = GenerationConfig(temperature=0.9, seed=4)
    ahead, on_demand = TokenChooser(config), TokenChooser(config)
    ahead.draw_ahead(10, 5, 200)
    for position in range(8, 18):
        assert ahead.choose(logits, position, None) == on_demand.choose(logits, position, None)


FILTERS = ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.1})


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("filters", FILTERS)
def test_a_candidate_list_with_the_whole_vocabulary_guesses_the_choice(
    filters: dict[str, float], is_sorted: bool
) -> None:
    """Draft and exit rank with the target's own noise and filters: with its own distribution they cannot miss."""
    config = GenerationConfig(temperature=0.7, seed=9, **filters)  # type: ignore[arg-type]
    chooser = TokenChooser(config)
    for position in range(50):
        logits = RNG.normal(scale=1.5, size=40)
        order = np.argsort(-logits) if is_sorted else RNG.permutation(40)
        logprobs = (logits - np.log(np.exp(logits).sum()))[order]
        guess = chooser.guess(order[None], logprobs[None].astype(np.float32), np.array([position]))
        assert int(guess[0]) == chooser.choose(logits, position, None).token


def test_a_dropped_candidate_stands_behind_one_that_is_kept_and_unknown_rows_stay_unknown() -> None:
    chooser = TokenChooser(GenerationConfig(temperature=1.0, seed=3, top_p=0.5, min_p=0.01))
    logprobs = np.array([np.log([0.6, 0.3, 0.1]), [-np.inf] * 3], dtype=np.float32)
    with np.errstate(all="raise"):
        scores = chooser.scores(logprobs, np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
    assert scores[0].argmax() == 0
    assert np.isneginf(scores[1]).all()


def test_noise_of_filtered_texts_is_drawn_ahead_where_the_draft_hears_it() -> None:
    """The target itself needs only the noise of the tokens it keeps."""
    chooser = TokenChooser(GenerationConfig(temperature=1.0, seed=3, top_p=0.5))
    assert not chooser.draws_ahead
    chooser.is_heard_by_draft = True
    assert chooser.draws_ahead


def test_greedy_reports_the_gap_to_the_runner_up() -> None:
    choice = TokenChooser(GenerationConfig(repetition_penalty=1.1)).choose(np.array([1.0, 3.5, 3.0]), 0, np.array([0]))
    assert (choice.token, round(choice.gap, 6)) == (1, 0.5)
