"""The target's choice: filters against transformers, noise against its law, ranking against choosing."""

from unittest import mock

import numpy as np
import pytest

from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.runtime.decoding.request import graph_choice
from mirrorsd.runtime.sampling.chooser import Choice, TokenChooser
from mirrorsd.runtime.sampling.filters import kept_tokens
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.noise import _variates, gumbel, gumbel_row
from mirrorsd.texts.config import GenerationConfig

RNG = np.random.default_rng(11)
FIRST_NOISE = [
    [0.08215563365265449, -0.9912713353756119],
    [5.414848998191181, -0.3178468178493672],
    [-0.24936505465833136, -0.3470364287597881],
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
    assert kept_of(scores, ShortlistFilter(1.0, top_k, top_p, min_p)) == expected


def kept_of(logits: np.ndarray, filters: ShortlistFilter) -> set[int]:
    ids = kept_tokens(logits, float(logits.max()), filters)
    return set(range(len(logits)) if ids is None else ids.tolist())


def sorted_kept(logits: np.ndarray, filters: ShortlistFilter) -> np.ndarray:
    """The definition, word by word: everything sorted, masses in double precision."""
    order = np.argsort(-logits, kind="stable")[: filters.top_k or len(logits)]
    masses = np.exp((logits[order].astype(np.float64) - float(logits.max())) / filters.temperature)
    is_kept = np.cumsum(masses) - masses < filters.top_p * masses.sum()
    return order[(is_kept if filters.top_p < 1 else masses >= 0) & (masses >= filters.min_p)]


WIDE_FILTERS = [
    *({"top_k": 20}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.05}, {"top_p": 0.9999}, {"min_p": 0.05}),
    *({"top_k": 20, "top_p": 0.8}, {"top_k": 40_000, "top_p": 0.95}, {"top_p": 0.95, "min_p": 0.02}, {"min_p": 1e-6}),
]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("filters", WIDE_FILTERS, ids=str)
def test_a_wide_vocabulary_is_filtered_and_chosen_from_as_sorting_it_would_be(
    filters: dict[str, float], spread: float
) -> None:
    """Peaked and flat ones, ties, and tokens that cannot be: the same token, and the same distance to the runner-up."""
    config = GenerationConfig(temperature=0.7, seed=8, **filters)  # type: ignore[arg-type]
    chooser, wanted = TokenChooser(config), ShortlistFilter(0.7, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters})  # type: ignore[arg-type]
    random = np.random.default_rng(int(spread))
    for position in range(12):
        logits = random.normal(scale=spread, size=50_001).astype(np.float32)
        logits[random.integers(0, logits.size, 500)] = np.float32(spread)
        logits[random.integers(0, logits.size, 500)] = -np.inf
        kept = sorted_kept(logits, wanted)
        scores = logits[kept].astype(np.float64) / 0.7 + gumbel(8, np.array([position]), kept)
        best = np.argsort(-scores, kind="stable")[:2]
        gap = float(scores[best[0]] - scores[best[1]]) if len(best) > 1 else float("inf")
        found = chooser.choose(logits, position, None)
        assert found.token == int(kept[best[0]])
        assert found.gap == gap


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 7, "top_p": 0.5}, {"min_p": 0.2}, {"top_k": 5}])
def test_of_equal_tokens_the_lower_ids_are_kept(filters: dict[str, float]) -> None:
    wanted = ShortlistFilter(1.0, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters})  # type: ignore[arg-type]
    for logits in (np.zeros(10, np.float32), np.array([0, 1, 0, 1, 0, 1, 0, 1], np.float32)):
        assert kept_of(logits, wanted) == set(sorted_kept(logits, wanted).tolist())


SAMPLED = ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9}, {"repetition_penalty": 1.2})


@pytest.mark.parametrize("settings", [*SAMPLED, {"temperature": None, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("wrong", [[np.nan], [np.inf], [-np.nan, -np.inf], [-np.inf] * 8], ids=str)
def test_logits_that_are_no_numbers_are_an_error(settings: dict, wrong: list[float]) -> None:
    chooser = TokenChooser(GenerationConfig(**{"temperature": 0.8, "seed": 1, **settings}))
    logits = np.arange(8, dtype=np.float32)
    logits[8 - len(wrong) :] = wrong
    with pytest.raises(DeviceError, match="NaN or infinite logits for position 12"):
        chooser.choose(logits, 12, np.array([1, 2]))


@pytest.mark.parametrize("settings", SAMPLED, ids=str)
def test_tokens_that_cannot_be_are_no_error_and_never_chosen(settings: dict) -> None:
    chooser = TokenChooser(GenerationConfig(**{"temperature": 0.8, "seed": 1, **settings}))
    logits = np.where(np.arange(300) % 3 == 1, 0.0, -np.inf).astype(np.float32)
    assert all(chooser.choose(logits, place, np.array([1])).token % 3 == 1 for place in range(50))
    logits[4:] = -np.inf
    assert chooser.choose(logits, 0, np.array([1])) == Choice(1, float("inf"))


def test_a_graph_whose_best_are_no_numbers_is_an_error() -> None:
    assert graph_choice(3, 0.5, 7) == Choice(3, 0.5)
    with pytest.raises(DeviceError, match="position 7"):
        graph_choice(0, float("nan"), 7)


def test_every_word_has_a_finite_variate_of_its_own() -> None:
    noise = _variates(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) > 0).all()


def test_a_sampled_text_without_a_seed_is_not_chosen_for() -> None:
    with pytest.raises(ConfigError, match="resolve draws one"):
        TokenChooser(GenerationConfig(temperature=1.0))


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
    """A seed stands for a text: another noise would be another text."""
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


def test_noise_is_drawn_ahead_until_the_pass_is_over() -> None:
    """Of a long window most rows are never chosen from: nobody waits for their noise."""
    chooser, looks = TokenChooser(GenerationConfig(temperature=0.9, seed=4)), iter([False, True])
    with mock.patch("mirrorsd.runtime.sampling.noise.gumbel_row", wraps=gumbel_row) as drawn:
        chooser.draw_ahead(10, 20, 200, lambda: next(looks))
    assert [call.args[1] for call in drawn.call_args_list] == [10, 11]


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
        scores = chooser.rank(order[None], logprobs[None].astype(np.float32), np.array([position]))
        guess = order[np.argmax(scores[0])] if not chooser.keeps_order else order[0]
        assert int(guess) == chooser.choose(logits, position, None).token


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
    assert not chooser.draws_ahead(50_000)
    chooser.is_heard_by_draft = True
    assert chooser.draws_ahead(50_000)
    assert not chooser.draws_ahead(4_096), "that is done before a thread is awake"


def test_rows_of_noise_that_others_have_asked_for_are_forgotten() -> None:
    """A head that `auto` tries asks for whole rows, of which the target's own choice needs none."""
    chooser = TokenChooser(GenerationConfig(temperature=1.0, seed=3, top_p=0.5))
    source = chooser.noise_source()
    assert source is not None
    for position in range(50):
        chooser.draw_ahead(position, 4, 200)
        source(position, 200), source(position + 1, 200)
    assert len(chooser._noise._rows) <= 2


def test_greedy_reports_the_gap_to_the_runner_up() -> None:
    choice = TokenChooser(GenerationConfig(repetition_penalty=1.1)).choose(np.array([1.0, 3.5, 3.0]), 0, np.array([0]))
    assert (choice.token, round(choice.gap, 6)) == (1, 0.5)
