"""Branches: continuations of roots, grown pass by pass, and the table through which the scheduler reads them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import TipGuesses
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.runtime.policy.windows import Share


class BranchWindow(NamedTuple):
    """A finished or unfinished branch as the scheduler sees it: the tokens after the root, and where it came from.

    `shares` and `num_main` are those of `WindowLength.cut`.
    """

    tokens: NDArray[np.int64]
    source: str
    shares: list[Share]
    num_main: int


class Branch:
    """One root and its continuation on the draft device.

    `start` is the root token's absolute position: the branch sees every chain token before it. `fed` are the tokens
    (root first) whose keys and values are in `slots`; `guesses` are the tokens predicted after them. Entry `t` of
    `candidate_ids` and `candidate_logprobs` (`[m]` each) is what the draft thinks comes after token `t` of the branch;
    entry `t` of `shares` is how sure it is of the one it chose there (see `WindowLength.cut`).
    """

    __slots__ = ("candidate_ids", "candidate_logprobs", "fed", "guesses", "root", "shares", "slots", "start")

    def __init__(self, root: Root, start: int) -> None:
        self.root = root
        self.start = start
        self.fed: list[int] = []
        self.slots: list[int] = []
        self.guesses: list[int] = [root.token]
        self.candidate_ids: list[NDArray[np.int64]] = []
        self.candidate_logprobs: list[NDArray[np.float32]] = []
        self.shares: list[Share] = []

    @property
    def window(self) -> list[int]:
        """The tokens after the root: confirmed ones, then guesses."""
        return (self.fed + self.guesses)[1:]

    @property
    def num_window(self) -> int:
        """How many tokens there are after the root."""
        return len(self.fed) + len(self.guesses) - 1

    def published(self, gamma: int) -> BranchWindow:
        """The branch as the scheduler sees it, `gamma` tokens at most."""
        tokens = np.asarray(self.window[:gamma], dtype=np.int64)
        return BranchWindow(tokens, self.root.source, self.shares[:gamma], len(self.fed))

    def absorb(self, predicted: Sequence[Sequence[int]], shares: Sequence[Sequence[Share]], tips: TipGuesses) -> int:
        """Take in a pass that was fed all current guesses; return how many of its rows to keep.

        `predicted[r][0]` is the draft's next token after fed row `r`, `predicted[r][j]` the token `j` further on, with
        `shares[r][j]`; `tips` are the candidate lists they were chosen from. A row is kept while the main guess
        before it agrees with it (Speculative Streaming, section 3.2).

        Guesses `[5, 6, 7]` were fed; the draft says 6 after 5, then 9 after 6: rows 5 and 6 stay, 9 replaces 7 and the
        streams of row 1 follow it:

        >>> branch = Branch(Root(0, 5, 1.0, "exit"), 10); branch.guesses = [5, 6, 7]
        >>> predicted = [[6, 0, 0], [9, 8, 4], [1, 0, 0]]
        >>> tips = TipGuesses(np.array(predicted)[..., None], np.zeros((3, 3, 1)))
        >>> branch.absorb(predicted, np.zeros((3, 3, 2)).tolist(), tips), branch.fed, branch.guesses
        (2, [5, 6], [9, 8, 4])
        """
        kept = 1
        while kept < len(self.guesses) and predicted[kept - 1][0] == self.guesses[kept]:
            kept += 1
        first, last = len(self.fed), kept - 1
        self.fed += self.guesses[:kept]
        self.guesses = [*predicted[last]]
        self.candidate_ids[first:] = [*tips.ids[:kept, 0], *tips.ids[last, 1:]]
        self.candidate_logprobs[first:] = [*tips.logprobs[:kept, 0], *tips.logprobs[last, 1:]]
        self.shares[first:] = [*(row[0] for row in shares[:kept]), *shares[last][1:]]
        return kept


class BranchTable:
    """Windows by root, written by the draft worker and read by the scheduler while the draft still works."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, int], BranchWindow] = {}
        self._is_closed = False

    def publish(self, branch: Branch, gamma: int) -> None:
        """Make a branch's current window visible; a later call replaces it."""
        self._windows[branch.root.row, branch.root.token] = branch.published(gamma)

    def get(self, row: int, token: int) -> BranchWindow | None:
        """The window prepared for the root, or None."""
        return self._windows.get((row, token))

    def close(self) -> None:
        """Tell the draft worker that verification is over: start no further round."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Whether the scheduler has stopped reading."""
        return self._is_closed
