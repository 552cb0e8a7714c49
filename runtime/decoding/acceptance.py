"""Which guesses the target accepts: a walk along its own choices, from the head token's row on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.policy.siblings import Siblings
from mirrorsd.runtime.sampling.chooser import Choice

ChooseRow = Callable[[int, Sequence[int]], Choice]
"""The target's choice behind a row, and the guesses that lead there from the head token on."""


class Acceptance(NamedTuple):
    """`num_accepted` leading window tokens equal the target's choices; `next_token` is the correction or bonus.

    `aside` are siblings that were right behind these.
    """

    num_accepted: int
    next_token: int
    gaps: tuple[float, ...]
    aside: tuple[int, ...] = ()

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens behind the accepted part of the window."""
        return (*self.aside, self.next_token)

    @property
    def num_right(self) -> int:
        """Guesses that were right."""
        return self.num_accepted + len(self.aside)


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


def accept_tree(window: NDArray[np.int64], siblings: Siblings, choose: ChooseRow) -> Acceptance:
    """As `accept_window`, with siblings: the target's choice behind a row picks the row that follows, if there is one.

    `choose(row, path)` is asked for rows of the text alone; `path` are the guesses that lead there. Row 0 is the head
    token's, the window's rows follow, then the siblings'.

    Window `[7, 8]` has 5 beside its 8. The target says 7, then 5, and 4 behind that, in row 3:

    >>> choices = [7, 5, 0, 4]
    >>> accept_tree(np.array([7, 8]), Siblings(np.array([5]), np.array([1])), lambda row, _: Choice(choices[row], 1.0))
    Acceptance(num_accepted=1, next_token=4, gaps=(1.0, 1.0, 1.0), aside=(5,))
    """
    rows = {(row, token): row + 1 for row, token in enumerate(window.tolist())}
    beside = zip(siblings.parents.tolist(), siblings.tokens.tolist(), strict=True)
    rows |= {place: len(window) + 1 + number for number, place in enumerate(beside)}
    path: list[int] = []
    gaps: list[float] = []
    row, num_accepted = 0, 0
    while True:
        choice = choose(row, path)
        gaps.append(choice.gap)
        following = rows.get((row, choice.token))
        if following is None:
            return Acceptance(num_accepted, choice.token, tuple(gaps), tuple(path[num_accepted:]))
        path.append(choice.token)
        row = following
        num_accepted += row <= len(window)
