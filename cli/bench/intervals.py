"""How far a ratio may be from what other texts would show: what drawing the same few texts again leaves out.

Texts that are drawn again have less spread than texts that are new, the less the fewer there are. So an interval of
redrawn texts is widened to what Student's distribution has for as many.
"""

from collections.abc import Sequence
from math import sqrt

_NORMAL = 1.959964
"""What 95 of 100 draws of a normal distribution lie within, in standard deviations."""


def widened(low: float, middle: float, high: float, sizes: Sequence[int]) -> tuple[float, float]:
    """The interval of a ratio around `middle`, from that of redrawn texts, `low` to `high`; `sizes` are the strata's.

    Deviations are scaled as those of logarithms: by the root of n / (n - 1), and by Student's quantile over the normal
    one's (its expansion by Cornish and Fisher).

    >>> [round(end, 2) for end in widened(0.9, 1.0, 1.1, [3, 3, 3])], widened(0.9, 1.0, 1.1, [400])[0] > 0.899
    ([0.85, 1.16], True)
    """
    freedom = sum(size - 1 for size in sizes)
    if freedom < 1 or min(low, middle, high) <= 0:
        return low, high
    z = _NORMAL
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    share = sqrt(sum(sizes) / freedom) * student / z
    return middle * (low / middle) ** share, middle * (high / middle) ** share
