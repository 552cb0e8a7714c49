"""Gumbel noise that depends on nothing but (seed, position, token): the root of seed-exact sampling.

A counter-based generator is evaluated where a variate is needed, so the target, the exit and the draft see the same
noise without sharing any state: a 64-bit key per (seed, position) from the splitmix64 finaliser (Steele et al. 2014),
and for each token 32 bits, a permutation of its id that the key's two halves choose (two rounds of the mixer
"lowbias32", Wellons 2018). Words of 32 bits cost a processor half of what those of 64 do. A variate is the Gumbel
quantile in the middle of its word's share of 2**-32.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NOISE = "splitmix64-lowbias32-1"
"""The name of this noise, for files that hold what was ranked with it: other noise must have another."""
_MASK, _HALF = int(np.iinfo(np.uint64).max), int(np.iinfo(np.uint32).max)
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_STEP = np.uint64(_GOLDEN)
_KEY_ROUNDS = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))
_LAST_KEY_SHIFT, _HALF_KEY = np.uint64(31), np.uint64(32)
_OUTER_SHIFT, _INNER_SHIFT = np.uint32(16), np.uint32(15)
_FACTORS, _ODD = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)), np.uint32(0x9E3779B1)
_FEW = 4
"""One in so many tokens: the noise of more of them costs as much as a whole row's."""
_PIECE = 40_000
"""Tokens at a time: 160 KiB of words, which a core's cache holds twice beside a row of logits."""


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
    keys = position_keys(seed, positions)
    first, second = _shifted(keys.astype(np.uint32)), _shifted((keys >> _HALF_KEY).astype(np.uint32))
    words = _shifted(tokens.astype(np.uint32) * _ODD) ^ first
    _mix_in_place(words, second, np.empty_like(words))
    return _variates(_shifted(words))


def gumbel_row(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """`gumbel` for the tokens `0 .. vocab_size - 1` at one position, `[V]`."""
    noise = np.empty(vocab_size)
    for first, words in _row_words(seed, position, vocab_size):
        noise[first : first + len(words)] = _variates(_shifted(words))
    return noise


class TextNoise:
    """One text's noise: rows of coming positions are drawn ahead and kept. Any thread may ask for one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rows: dict[int, NDArray[np.float64]] = {}

    def row(self, position: int, vocab_size: int) -> NDArray[np.float64]:
        """The noise of a position, `[V]`, which is kept from now on."""
        noise = self._rows.get(position)
        if noise is None or len(noise) < vocab_size:
            noise = self._rows[position] = gumbel_row(self._seed, position, vocab_size)
        return noise[:vocab_size]

    def forget_before(self, position: int) -> None:
        """Let go of the rows of earlier positions."""
        known = self._rows.copy()  # another thread may add to it
        self._rows = {place: noise for place, noise in known.items() if place >= position}

    def among(self, position: int, ids: NDArray[np.int64] | None, vocab_size: int) -> NDArray[np.float64]:
        """The noise of tokens `ids [n]` (None: all) of a vocabulary, from a row that is kept where there is one."""
        row = self._rows.get(position)
        is_kept = row is not None and len(row) >= vocab_size
        if ids is not None and not is_kept and len(ids) <= vocab_size // _FEW:
            return gumbel(self._seed, np.array([position]), ids)
        whole = row[:vocab_size] if row is not None and is_kept else gumbel_row(self._seed, position, vocab_size)
        return whole if ids is None else whole[ids]

    def at(self, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The noise of tokens `[..., m]` at positions `[...]`."""
        return gumbel(self._seed, positions[..., None], ids)


def _row_words(seed: int, position: int, vocab_size: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """The words of a row before their last shift, in pieces: the first place, and `[n]` until the next piece."""
    key = _mix((position * _GOLDEN + _mix((seed + _GOLDEN) & _MASK)) & _MASK)
    first_half, second_half = (np.uint32(half ^ (half >> 16)) for half in (key & _HALF, key >> 32))
    shares = _shares(vocab_size)
    rows = np.empty((2, min(len(shares), _PIECE)), dtype=np.uint32)
    for first in range(0, len(shares), _PIECE):
        words, scratch = rows[:, : len(shares) - first]
        np.bitwise_xor(shares[first : first + _PIECE], first_half, out=words)
        _mix_in_place(words, second_half, scratch)
        yield first, words


@lru_cache(maxsize=4)
def _shares(vocab_size: int) -> NDArray[np.uint32]:
    """What tokens bring to their words, whatever the key: `[V]`."""
    return _shifted(np.arange(vocab_size, dtype=np.uint32) * _ODD)


def _shifted(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return words ^ (words >> _OUTER_SHIFT)


def _mix_in_place(
    words: NDArray[np.uint32], second: NDArray[np.uint32] | np.uint32, scratch: NDArray[np.uint32]
) -> None:
    """Two rounds of the mixer, from behind the first shift to before the last one.

    A round is: shift by 16, multiply, shift by 15, multiply, shift by 16. A shift by 16 undoes itself, so that of the
    two between the rounds only the one of the key's second half is left.
    """
    _multiply_twice(words, scratch)
    words ^= second
    _multiply_twice(words, scratch)


def _multiply_twice(words: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    words *= _FACTORS[0]
    np.right_shift(words, _INNER_SHIFT, out=scratch)
    words ^= scratch
    words *= _FACTORS[1]


def _variates(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The Gumbel variates of these words: finite for every one."""
    values = words.astype(np.float64)
    values += 0.5
    values *= 2.0**-32
    for _ in range(2):
        np.log(values, out=values)
        np.negative(values, out=values)
    return values
