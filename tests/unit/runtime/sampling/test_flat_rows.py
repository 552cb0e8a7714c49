"""What top-p keeps of flat rows, mostly without weighing them: as weighing all says."""

import numpy as np
import pytest

from mirrorsd.runtime.sampling.flat_rows import CountedBorder, HeadBorder, Levels
from mirrorsd.runtime.sampling.likely_tokens import WeighedBorder, in_parts

VOCAB, TEMPERATURE = 40_000, 0.8


def rows(kind: str) -> np.ndarray:
    random = np.random.default_rng(7)
    if kind == "even":
        return np.full(VOCAB, 3.0, np.float32)
    if kind == "masked":
        return np.where(random.random(VOCAB) < 0.5, random.normal(size=VOCAB), -np.inf).astype(np.float32)
    logits = random.normal(5.0, 0.5, VOCAB).astype(np.float32)
    return np.round(logits * 16) / np.float32(16) if kind == "of few values" else logits


def weighed(logits: np.ndarray, top_p: float, ids: np.ndarray | None = None) -> WeighedBorder:
    weights = np.exp((logits - logits.max()) / np.float32(TEMPERATURE))
    kept_mass = top_p * sum(mass for _, mass in in_parts(weights))
    ids = np.arange(VOCAB) if ids is None else ids
    return WeighedBorder(logits[ids], weights[ids], in_parts(weights[ids]), kept_mass, np.empty(VOCAB, np.float32))


def asked(logits: np.ndarray, top_p: float) -> tuple[list[int], int]:
    """Places all over the row by rank, those around the border in the middle, and how many tokens are kept."""
    order = np.argsort(-logits, kind="stable")
    masses = np.exp((logits[order].astype(np.float64) - float(logits.max())) / TEMPERATURE)
    num_kept = int(np.count_nonzero(np.cumsum(masses) - masses < top_p * masses.sum()))
    ranks = [0, 1, num_kept // 2, num_kept - 2, num_kept - 1, num_kept, num_kept + 1, num_kept // 3, VOCAB - 1]
    return [int(order[rank]) for rank in ranks], num_kept


def levels_of(logits: np.ndarray, first: float, count: int) -> Levels:
    return Levels(logits, float(logits.max()), TEMPERATURE, first, count)


def counted(logits: np.ndarray, top_p: float, weigh: object) -> CountedBorder:
    return CountedBorder(levels_of(logits, float(np.nextafter(logits.max(), np.inf)), 0), top_p, weigh)  # type: ignore[arg-type]


def refuse() -> WeighedBorder:
    raise AssertionError("nobody here stands near the border")


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["bell", "of few values", "even", "masked"])
def test_counting_says_what_weighing_says(kind: str, top_p: float) -> None:
    logits = rows(kind)
    exact = weighed(logits, top_p)
    for place in asked(logits, top_p)[0]:
        border = counted(logits, top_p, lambda: exact.is_behind)
        assert border.is_behind(place) == exact.is_behind(place)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.45])
@pytest.mark.parametrize("kind", ["bell", "of few values", "masked"])
def test_a_weighed_head_and_counted_others_say_what_weighing_all_says(kind: str, top_p: float) -> None:
    logits = rows(kind)
    places, num_kept = asked(logits, top_p)
    exact, lowest = weighed(logits, top_p), np.sort(logits)[-num_kept - 500]
    ids = np.flatnonzero(logits >= lowest)
    head = weighed(logits, top_p, ids)
    border = HeadBorder(
        head.mass, head.mass_before, levels_of(logits, float(lowest), len(ids)), top_p, lambda: exact.kept_mass
    )
    for place in set(places) & set(ids.tolist()):
        assert border.is_behind(int(np.searchsorted(ids, place))) == exact.is_behind(place)
    assert border.has_room(0.0)
    assert not border.has_room(head.mass)


@pytest.mark.parametrize("kind", ["bell", "of few values", "even"])
def test_far_from_the_border_a_few_counts_say_it(kind: str) -> None:
    logits, top_p = rows(kind), 0.9
    border = counted(logits, top_p, refuse)
    order = np.argsort(-logits, kind="stable")
    assert border.is_behind(int(order[0]))
    assert border.is_behind(int(order[VOCAB // 4]))
    assert not border.is_behind(int(order[-1]))


def test_between_two_levels_each_token_weighs_at_least_the_lower_and_at_most_the_upper() -> None:
    """Of the logits 0, -1, -2 and -3 two lie between -0.5 and -2.5; the best is 0."""
    logits = np.array([0.0, -1.0, -2.0, -3.0], np.float32)
    levels = Levels(logits, 0.0, 1.0, -0.5, 1)
    levels.add(np.float32(-2.5))
    assert levels.values == [-0.5, -2.5, -np.inf]
    assert levels.least == pytest.approx([2 * np.exp(-2.5), 0.0])
    assert levels.most == pytest.approx([2 * np.exp(-0.5), np.exp(-2.5)])
