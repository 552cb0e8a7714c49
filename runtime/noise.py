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


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def position_keys(seed: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit key per absolute position."""
    start = np.uint64(_mix((seed + _GOLDEN) & _MASK))
    with np.errstate(over="ignore"):
        return _mix_array(start + positions.astype(np.uint64) * np.uint64(_GOLDEN))


def gumbel(seed: int, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel variates for tokens at positions (broadcast against each other).

    The same (seed, position, token) gives the same variate on every machine, in every call.
    """
    keys = position_keys(seed, np.asarray(positions, dtype=np.int64))
    with np.errstate(over="ignore"):
        counters = (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        bits = _mix_array(_mix_array(keys + counters))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))
