"""Gumbel noise that depends on nothing but (seed, position, token): the root of seed-exact sampling.

A counter-based generator (the splitmix64 finaliser, Steele et al. 2014) is evaluated where a variate is needed, so the
target, the exit and the draft see the same noise without sharing any state.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ROUNDS = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))
_LAST_SHIFT, _SPARE_BITS, _ONE, _STEP = np.uint64(31), np.uint64(11), np.uint64(1), np.uint64(_GOLDEN)
_LARGEST = 1.0 - 2.0**-53
"""The last of 2**53 variates would round to 1, and its noise be infinite; no other comes as high."""
_PIECE = 8192
"""Tokens at a time: 64 KiB of each array."""


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def nth_seed(seed: int, number: int) -> int:
    """The seed of the `number`-th of several answers to one prompt: the first has the seed itself.

    >>> nth_seed(7, 0), nth_seed(7, 1) == nth_seed(7, 1), nth_seed(7, 1) == nth_seed(8, 1)
    (7, True, False)
    """
    return _mix(_mix((seed + _GOLDEN) & _MASK) ^ (number * _MIX_1 & _MASK)) if number else seed


def position_keys(seed: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit key per absolute position `[n, ...]`."""
    keys = positions.astype(np.uint64)
    keys *= _STEP
    keys += np.uint64(_mix((seed + _GOLDEN) & _MASK))
    _mix_in_place(keys, np.empty_like(keys))
    return keys


def gumbel(seed: int, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel variates for tokens `[n, ...]` at positions `[n, ...]` (broadcast against each other).

    The same (seed, position, token) gives the same variate on every machine, in every call.
    """
    counters = tokens.astype(np.uint64)
    counters += _ONE
    counters *= _STEP
    return _variates(counters + position_keys(seed, positions))


def gumbel_row(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """`gumbel` for the tokens `0 .. vocab_size - 1` at one position, `[V]`: in pieces that stay in the cache."""
    key = position_keys(seed, np.array([position]))
    noise = np.empty(vocab_size)
    for first in range(0, vocab_size, _PIECE):
        counters = np.arange(first + 1, min(first + _PIECE, vocab_size) + 1, dtype=np.uint64)
        counters *= _STEP
        counters += key
        noise[first : first + _PIECE] = _variates(counters)
    return noise


def _variates(counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Gumbel variates of counters, which are written over."""
    scratch = np.empty_like(counters)
    _mix_in_place(counters, scratch)
    _mix_in_place(counters, scratch)
    counters >>= _SPARE_BITS
    values = counters.astype(np.float64)
    values += 0.5
    values *= 2.0**-53
    np.minimum(values, _LARGEST, out=values)
    for _ in range(2):
        np.log(values, out=values)
        np.negative(values, out=values)
    return values


def _mix_in_place(values: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    for shift, factor in _ROUNDS:
        np.right_shift(values, shift, out=scratch)
        values ^= scratch
        values *= factor
    np.right_shift(values, _LAST_SHIFT, out=scratch)
    values ^= scratch
