"""Which tokens the filters keep: as sorting the whole vocabulary would say."""

import numpy as np
import pytest

from mirrorsd.runtime.sampling.filters import kept_tokens
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

THREE = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))


def filters(temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ShortlistFilter:
    return ShortlistFilter(temperature, top_k, top_p, min_p)


def kept_of(logits: np.ndarray, wanted: ShortlistFilter) -> set[int]:
    ids = kept_tokens(logits, float(logits.max()), wanted)
    assert ids is None or (np.diff(ids) > 0).all()
    return set(range(len(logits)) if ids is None else ids.tolist())


def kept_by_sorting(logits: np.ndarray, wanted: ShortlistFilter) -> set[int]:
    order = np.argsort(-logits, kind="stable")[: wanted.top_k or None]
    masses = np.exp((logits[order].astype(np.float64) - float(logits.max())) / wanted.temperature)
    has_room = np.cumsum(masses) - masses < wanted.top_p * masses.sum()
    is_kept = (has_room | (wanted.top_p >= 1)) & (masses >= wanted.min_p)
    return set(order[is_kept].tolist())


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (filters(top_k=1), {1}),
        (filters(top_k=2), {1, 2}),
        (filters(top_k=9), {0, 1, 2}),
        (filters(top_p=0.5), {1}),
        (filters(top_p=0.8), {1, 2}),
        (filters(top_p=0.95), {0, 1, 2}),
        (filters(min_p=0.4), {1, 2}),
        (filters(min_p=0.6), {1}),
        (filters(top_k=2, top_p=0.65), {1}),
        (filters(0.5, top_p=0.75), {1}),
        (filters(2.0, min_p=0.6), {1, 2}),
    ],
    ids=str,
)
def test_three_tokens_are_kept_as_by_hand(wanted: ShortlistFilter, kept: set[int]) -> None:
    """Of 0.6, 0.3 and 0.1, top-k of 2 leaves two thirds to the first; half the temperature, 36, 9 and 1 of 46."""
    assert kept_of(THREE, wanted) == kept


@pytest.mark.parametrize("size", [7, 500, 5000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    "wanted",
    [
        filters(top_k=5),
        filters(0.8, top_p=0.9),
        filters(1.3, min_p=0.02),
        filters(0.7, top_k=40, top_p=0.8, min_p=0.01),
    ],
    ids=str,
)
def test_what_is_kept_is_what_sorting_keeps(size: int, spread: float, wanted: ShortlistFilter) -> None:
    random = np.random.default_rng(size)
    for _ in range(3):
        logits = random.normal(scale=spread, size=size).astype(np.float32)
        assert kept_of(logits, wanted) == kept_by_sorting(logits, wanted)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 0.8, 1.5, 3.0])
def test_of_a_flat_row_the_tokens_around_the_border_are_told_apart(spread: float, share: float) -> None:
    """More tokens than are sorted; of those that rounding alone decides on there may be one more or less."""
    logits = np.random.default_rng(5).normal(scale=spread, size=40_000).astype(np.float32)
    kept, expected = kept_of(logits, filters(top_p=share)), kept_by_sorting(logits, filters(top_p=share))
    assert len(kept ^ expected) <= (0 if spread == 0 else 2)
    order = np.argsort(-logits, kind="stable").tolist()
    assert kept == set(order[: len(kept)]), "a better one is never dropped for a worse one"


def test_tokens_whose_weights_round_to_one_number_are_told_apart_by_their_logits() -> None:
    """Most of a row of 20,000 shares one bin; its last logits differ by less than their exponentials."""
    logits = (1.0 + np.arange(20_000) % 7 * np.float32(1.2e-7)).astype(np.float32)
    order = np.argsort(-logits, kind="stable").tolist()
    kept = kept_of(logits, filters(top_p=0.5))
    assert 9_990 < len(kept) < 10_010
    assert kept == set(order[: len(kept)])


@pytest.mark.parametrize("wanted", [filters(top_k=3), filters(top_p=0.5)])
def test_of_equals_the_lower_ids_are_kept(wanted: ShortlistFilter) -> None:
    assert kept_of(np.zeros(6, np.float32), wanted) == {0, 1, 2}
