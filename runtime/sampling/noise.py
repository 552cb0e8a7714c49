"""Gumbel noise that depends on nothing but (seed, position, token): the root of seed-exact sampling.

A counter-based generator is evaluated where a variate is needed, so the target, the exit and the draft see the same
noise without sharing any state: a 64-bit key per (seed, position) from the splitmix64 finaliser (Steele et al. 2014),
and for each token 32 bits, a permutation of its id that the key's two halves choose (two rounds of the mixer
"lowbias32", Wellons 2018). Words of 32 bits cost a processor half of what those of 64 do. A variate is the Gumbel
quantile in the middle of its word's share of 2**-32.
"""

import math

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_STEP = np.uint64(_GOLDEN)
_KEY_ROUNDS = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))
_LAST_KEY_SHIFT, _HALF_KEY = np.uint64(31), np.uint64(32)
_ROUNDS = ((np.uint32(16), np.uint32(0x7FEB352D)), (np.uint32(15), np.uint32(0x846CA68B)))
_LAST_SHIFT, _ODD = np.uint32(16), np.uint32(0x9E3779B1)
_PIECE = 16_384
"""Tokens at a time: 64 KiB of words."""


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
    for shift, factor in _KEY_ROUNDS:
        keys ^= keys >> shift
        keys *= factor
    keys ^= keys >> _LAST_KEY_SHIFT
    return keys


def gumbel(seed: int, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel variates for tokens `[n, ...]` at positions `[n, ...]` (broadcast against each other).

    The same (seed, position, token) gives the same variate on every machine, in every call.
    """
    return _variates(_words(position_keys(seed, positions), tokens.astype(np.uint32)))


def gumbel_row(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """`gumbel` for the tokens `0 .. vocab_size - 1` at one position, `[V]`: in pieces that stay in the cache."""
    key = position_keys(seed, np.array([position]))
    noise = np.empty(vocab_size)
    for first in range(0, vocab_size, _PIECE):
        tokens = np.arange(first, min(first + _PIECE, vocab_size), dtype=np.uint32)
        noise[first : first + _PIECE] = _variates(_words(key, tokens))
    return noise


def loud_tokens(seed: int, position: int, vocab_size: int, level: float) -> NDArray[np.int64]:
    """Those of the tokens `0 .. vocab_size - 1` whose `gumbel` is at least `level`, ascending, and few more.

    Variates grow with their words, so this costs a fifth of a row of them.
    """
    key = position_keys(seed, np.array([position]))
    border = np.uint32(max(math.floor(math.exp(-math.exp(-level)) * 2**32) - 1, 0))
    found = []
    for first in range(0, vocab_size, _PIECE):
        tokens = np.arange(first, min(first + _PIECE, vocab_size), dtype=np.uint32)
        found.append(np.flatnonzero(_words(key, tokens) >= border) + first)
    return np.concatenate(found)


def _words(keys: NDArray[np.uint64], tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """32 bits for tokens under keys (broadcast); another order of the words for every key."""
    words = (tokens * _ODD) ^ keys.astype(np.uint32)
    scratch = np.empty_like(words)
    _mix_in_place(words, scratch)
    words ^= (keys >> _HALF_KEY).astype(np.uint32)
    _mix_in_place(words, scratch)
    return words


def _mix_in_place(words: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=scratch)
        words ^= scratch
        words *= factor
    np.right_shift(words, _LAST_SHIFT, out=scratch)
    words ^= scratch


def _variates(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The Gumbel variates of these words: finite for every one."""
    values = words.astype(np.float64)
    values += 0.5
    values *= 2.0**-32
    for _ in range(2):
        np.log(values, out=values)
        np.negative(values, out=values)
    return values
