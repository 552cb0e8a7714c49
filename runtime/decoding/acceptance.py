"""How many window tokens the target confirms: a pure function over arrays."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.chooser import Choice


class Acceptance(NamedTuple):
    """`num_accepted` leading window tokens equal the target's choices; `next_token` is the correction or bonus."""

    num_accepted: int
    next_token: int
    gaps: tuple[float, ...]


def accept_window(window: NDArray[np.int64], choose_row: Callable[[int], Choice]) -> Acceptance:
    """Verify a window against the target, row by row, stopping at the first difference.

    Row `i` predicts what follows the head token and `i` window tokens, so its choice is compared with `window[i]`.
    `choose_row(i)` is called for rows `0 .. num_accepted` only: later rows saw a text that is not the target's.

    With window `[7, 8, 9]` and target choices `[7, 8, 5, ...]` two tokens are accepted and 5 is the correction:

    >>> choices = [7, 8, 5, 1]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (2, 5)

    With choices `[7, 8, 9, 4]` all three are accepted and 4 is the bonus:

    >>> choices = [7, 8, 9, 4]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (3, 4)
    """
    gaps = []
    for row, token in enumerate((*window.tolist(), None)):
        choice = choose_row(row)
        gaps.append(choice.gap)
        if choice.token != token:
            return Acceptance(row, choice.token, tuple(gaps))
    raise AssertionError("unreachable: no choice equals the None after the window")
