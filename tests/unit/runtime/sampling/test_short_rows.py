"""A row's best logits stand for the row: the same token for the same seed, or they are not taken."""

import numpy as np
import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.short_rows import ShortRow
from mirrorsd.texts.config import GenerationConfig

NUM_BEST = 64
FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "min_p": 0.05},
    {"top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.1},
]


def short_row(logits: np.ndarray, temperature: float, num_best: int = NUM_BEST) -> ShortRow:
    """As a device gives it: with equals in any order, and a sum in single precision."""
    order = np.random.default_rng(1).permutation(len(logits))
    best = order[np.argsort(-logits[order], kind="stable")[:num_best]]
    masses = np.exp((logits - logits.max()) / np.float32(temperature), dtype=np.float32)
    return ShortRow(best, logits[best], float(masses[::-1].cumsum(dtype=np.float32)[-1])).ordered()


def chooser(temperature: float, seed: int, **filters: float) -> TokenChooser:
    return TokenChooser(GenerationConfig(temperature=temperature, seed=seed, **filters))  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_the_token_is_that_of_the_whole_row(filters: dict[str, float], temperature: float) -> None:
    rng = np.random.default_rng(7)
    num_taken = 0
    for seed in range(120):
        spread = rng.choice([1.0, 4.0, 8.0])
        logits = (spread * rng.standard_normal(3000)).astype(np.float32)
        if seed % 3 == 0:
            logits = np.round(logits)  # many equals
        row = short_row(logits, temperature)
        asked = chooser(temperature, seed, **filters)
        assert asked.filters is not None
        if row.num_kept(asked.filters) is None:
            continue
        num_taken += 1
        found = asked.choose_of(row, 5)
        wanted = chooser(temperature, seed, **filters).choose(logits, 5, None)
        assert found.token == wanted.token
        assert found.gap == pytest.approx(wanted.gap) or min(found.gap, wanted.gap) > 0.2
    assert num_taken > 20


def test_a_border_among_equals_that_are_not_all_there_is_a_doubt() -> None:
    logits = np.zeros(1000, np.float32)
    logits[500] = 5.0
    row = short_row(logits, 1.0)
    assert row.num_kept(ShortlistFilter(1.0, 1, 1.0, 0.0)) == 1
    assert row.num_kept(ShortlistFilter(1.0, 2, 1.0, 0.0)) is None
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.99, 0.0)) is None, "999 equals of which 63 are seen"


def test_a_mass_at_the_border_is_a_doubt() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    row = ShortRow(np.arange(4), logits, 2.0)
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.7, 0.0)) == 2
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.8, 0.0)) is None
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.80001, 0.0)) is None
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.85, 0.0)) == 3
    assert row.num_kept(ShortlistFilter(1.0, 0, 0.99, 0.0)) is None, (
        "the last of the list may not be the last that is kept"
    )


def test_more_than_the_list_has_is_read_whole() -> None:
    row = short_row(np.random.default_rng(0).standard_normal(1000).astype(np.float32), 1.0, num_best=8)
    assert row.num_kept(ShortlistFilter(1.0, 8, 1.0, 0.0)) is None
    assert row.num_kept(ShortlistFilter(1.0, 7, 1.0, 0.0)) == 7


@pytest.mark.parametrize(
    "more",
    [{}, {"top_k": 5, "repetition_penalty": 1.2}, {"top_k": 5, "logprobs": True}],
    ids=["none", "penalty", "logprobs"],
)
def test_whole_rows_are_asked_for_where_more_than_filters_looks_at_them(more: dict[str, float]) -> None:
    assert chooser(1.0, 0, **more).filters is None


def test_a_row_that_is_no_numbers_is_an_error() -> None:
    row = ShortRow(np.arange(4), np.arange(4, dtype=np.float32)[::-1], float("nan"))
    with pytest.raises(DeviceError, match="NaN or infinite logits for position 3"):
        chooser(1.0, 0, top_k=2).choose_of(row, 3)
