"""Noise depends on nothing but seed, position and token, and has the law that makes the argmax a sample."""

import math

import numpy as np
import pytest

from mirrorsd.runtime.sampling.noise import NOISE, gumbel, gumbel_row, position_keys

TOKENS = np.arange(400)


def at(position: int, tokens: np.ndarray = TOKENS, seed: int = 5) -> np.ndarray:
    return gumbel(seed, np.array([position]), tokens)


def test_the_order_and_the_company_of_what_is_asked_change_nothing() -> None:
    expected = np.stack([at(position) for position in range(6)])
    backwards = [at(position) for position in reversed(range(6))]
    np.testing.assert_array_equal(np.stack(backwards[::-1]), expected)
    np.testing.assert_array_equal(gumbel(5, np.arange(6)[:, None], TOKENS[None]), expected)
    shuffled = np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_array_equal(at(3, shuffled), expected[3, shuffled])
    assert [at(3, np.array([token]))[0] for token in (0, 7, 399)] == expected[3, [0, 7, 399]].tolist()


def mixed(word: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ word >> shift) * factor % 2**32
    return word ^ word >> 16


@pytest.mark.parametrize("token", [0, 1, 151_935])
def test_a_variate_is_the_quantile_of_a_token_mixed_with_two_halves_of_a_key(token: int) -> None:
    key = int(position_keys(5, np.array([17]))[0])
    word = mixed(mixed(token * 0x9E3779B1 % 2**32 ^ key % 2**32) ^ key >> 32)
    expected = -math.log(-math.log((word + 0.5) / 2**32))
    assert gumbel(5, np.array([17]), np.array([token]))[0] == pytest.approx(expected, rel=1e-12)


def test_the_name_of_the_noise_stands_for_these_numbers() -> None:
    """Recordings name it: whoever changes the numbers gives them another name."""
    found = gumbel(7, np.array([0, 5, 900]), np.array([0, 3, 49151]))
    assert (NOISE, found.round(12).tolist()) == (
        "splitmix64-lowbias32-1",
        [2.083733425209, -0.231907316590, -0.810289808994],
    )


@pytest.mark.parametrize("size", [1, 39_999, 40_000, 40_001, 140_000])
def test_a_whole_row_is_the_noise_of_its_tokens(size: int) -> None:
    np.testing.assert_array_equal(gumbel_row(9, 31, size), gumbel(9, np.array([31]), np.arange(size)))


def test_the_caller_s_tokens_and_positions_are_left_alone() -> None:
    positions, tokens = np.array([4]), np.arange(5)
    gumbel(1, positions, tokens)
    assert (positions.tolist(), tokens.tolist()) == ([4], [0, 1, 2, 3, 4])


def test_every_seed_of_64_bits_has_noise_of_its_own() -> None:
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    rows = np.stack([at(17, seed=seed) for seed in seeds])
    assert np.isfinite(rows).all()
    assert len(np.unique(rows)) == rows.size
    assert np.abs(np.corrcoef(rows) - np.eye(len(seeds))).max() < 0.2


def test_a_token_s_noise_never_comes_again_in_a_text() -> None:
    values = gumbel(5, np.arange(5000)[:, None], np.array([[7, 8]]))
    assert len(np.unique(values)) == values.size


def test_mean_and_variance_are_those_of_the_gumbel_law() -> None:
    """0.5772 (Euler's constant) and pi squared over six, within four standard errors of 100,000 variates."""
    values = gumbel(3, np.arange(500)[:, None], np.arange(200)[None])
    assert values.mean() == pytest.approx(0.5772, abs=4 * 1.2825 / np.sqrt(values.size))
    assert values.var() == pytest.approx(np.pi**2 / 6, abs=4 * 3.45 / np.sqrt(values.size))


def test_the_best_of_log_probabilities_and_noise_is_a_sample() -> None:
    """Chi-square over 20,000 positions; 15.09 is exceeded once in a hundred by five degrees of freedom."""
    chances = np.array([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    noisy = np.log(chances) + gumbel(12, np.arange(20_000)[:, None], np.arange(6)[None])
    counts, expected = np.bincount(noisy.argmax(axis=1), minlength=6), 20_000 * chances
    assert ((counts - expected) ** 2 / expected).sum() < 15.09
