"""Which tokens the filters keep, and who of them wins: as sorting the whole vocabulary would say."""

import numpy as np
import pytest

from mirrorsd.runtime.sampling.likely_tokens import FAR, FEW, LikelyTokens, likely_tokens, new_scratch
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

THREE = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))


def filters(temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ShortlistFilter:
    return ShortlistFilter(temperature, top_k, top_p, min_p)


def likely_of(logits: np.ndarray, wanted: ShortlistFilter) -> LikelyTokens:
    return likely_tokens(logits, float(logits.max()), wanted, new_scratch(len(logits)))


def kept_of(logits: np.ndarray, wanted: ShortlistFilter) -> set[int]:
    likely = likely_of(logits, wanted)
    ids = np.arange(len(logits)) if likely.ids is None else likely.ids
    return {int(ids[place]) for place in range(len(ids)) if likely.keeps(place)}


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


@pytest.mark.parametrize("share", [0.3, 0.9])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_of_a_flat_row_the_tokens_around_the_border_are_told_apart(spread: float, share: float) -> None:
    logits = np.random.default_rng(5).normal(scale=spread, size=40_000).astype(np.float32)
    kept = kept_by_sorting(logits, filters(top_p=share))
    order = np.argsort(-logits, kind="stable")
    likely = likely_of(logits, filters(top_p=share))
    assert likely.ids is None
    far = [0, 1, len(kept) // 2, len(kept) - 9, len(kept) + 9, -1]
    near = [len(kept) + i for i in (-2, -1, 0, 1)] if spread == 0 else []
    for token in order[far + near]:
        assert likely.keeps(int(token)) == (int(token) in kept)


@pytest.mark.parametrize("wanted", [filters(top_k=3), filters(top_p=0.5)])
def test_of_equals_the_lower_ids_are_kept(wanted: ShortlistFilter) -> None:
    assert kept_of(np.zeros(6, np.float32), wanted) == {0, 1, 2}


class Noise:
    """A row of noise that knows whether all of it was asked for."""

    def __init__(self, row: np.ndarray) -> None:
        self.row, self.was_whole = row, False

    def of(self, ids: np.ndarray) -> np.ndarray:
        return self.row[ids]

    def whole(self) -> np.ndarray:
        self.was_whole = True
        return self.row

    def loud(self, level: float, ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        row = self.row if ids is None else self.row[ids]
        places = np.flatnonzero(row >= level)
        return places, row[places]


def test_the_best_kept_by_noise_wins_and_what_is_dropped_cannot() -> None:
    """Token 0 has the loudest noise but is dropped; of the others log 0.3 + 1 is more than log 0.6."""
    likely = likely_of(THREE, filters(top_p=0.8))
    found = likely.best_kept(Noise(np.array([10.0, 0.0, 1.0])), 1.0)
    assert [place for place, _ in found] == [2, 1]
    assert [score for _, score in found] == pytest.approx([np.log(0.3) + 1, np.log(0.6)])


def test_a_text_whose_filters_leave_one_token_has_no_runner_up() -> None:
    (only,) = likely_of(THREE, filters(top_k=1)).best_kept(Noise(np.zeros(3)), 0.5)
    assert only == (0, pytest.approx(2 * np.log(0.6)))


def test_the_winner_among_many_is_the_winner_of_the_sorted_ones() -> None:
    random, wanted = np.random.default_rng(4), filters(0.7, top_p=0.9)
    for _ in range(20):
        logits, noise = random.normal(scale=2.0, size=3000).astype(np.float32), random.gumbel(size=3000)
        kept = sorted(kept_by_sorting(logits, wanted))
        best = max(kept, key=lambda token: float(logits[token]) / 0.7 + noise[token])
        likely = likely_of(logits, wanted)
        place, score = likely.best_kept(Noise(noise), 0.7)[0]
        token = place if likely.ids is None else int(likely.ids[place])
        assert (token, score) == (best, pytest.approx(float(logits[best]) / 0.7 + noise[best]))


@pytest.mark.parametrize("wanted", [filters(top_p=0.9), filters(0.7, top_p=0.99), filters(min_p=0.01)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_of_a_flat_row_only_loud_noise_is_asked_for(spread: float, wanted: ShortlistFilter) -> None:
    random, num_whole = np.random.default_rng(4), 0
    for _ in range(20):
        logits, noise = random.normal(scale=spread, size=40_000).astype(np.float32), Noise(random.gumbel(size=40_000))
        likely = likely_of(logits, wanted)
        assert likely.ids is None
        found = likely.best_kept(noise, wanted.temperature)
        num_whole += noise.was_whole
        kept = np.array(sorted(kept_by_sorting(logits, wanted)))
        scores = logits[kept].astype(np.float64) / wanted.temperature + noise.row[kept]
        first, second = np.argsort(-scores)[:2]
        assert found[0] == (int(kept[first]), pytest.approx(scores[first]))
        assert scores[first] - scores[second] >= min(found[0][1] - found[1][1], FAR) - 1e-9
    assert num_whole <= 2


def test_a_small_nucleus_of_a_flat_row_is_picked_out() -> None:
    """It has more tokens than are worth noise of their own. Those at the border, which are weighed, are asked first."""
    random, wanted = np.random.default_rng(9), filters(0.8, top_p=0.4, min_p=0.001)
    for _ in range(5):
        logits, noise = random.normal(scale=0.7, size=150_000).astype(np.float32), Noise(random.gumbel(size=150_000))
        likely = likely_of(logits, wanted)
        assert likely.ids is not None
        kept = kept_by_sorting(logits, wanted)
        order = np.argsort(-logits, kind="stable")
        assert FEW < len(kept) < len(likely.ids) < 40_000
        for token in order[[len(kept) - 9, len(kept) + 9, 0, len(kept) // 2, len(kept) + 99]]:
            assert likely.keeps(int(np.searchsorted(likely.ids, token))) == (int(token) in kept)
        ids = np.array(sorted(kept))
        best = int(ids[np.argmax(logits[ids].astype(np.float64) / 0.8 + noise.row[ids])])
        place, score = likely.best_kept(noise, 0.8)[0]
        assert (int(likely.ids[place]), score) == (best, pytest.approx(float(logits[best]) / 0.8 + noise.row[best]))
