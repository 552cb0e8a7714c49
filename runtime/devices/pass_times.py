"""What a joint pass takes, by what is in it.

Owns: learning that from passes as they are run. Does not own: what follows from it (`company`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mirrorsd.runtime.ledger import TargetPass
from mirrorsd.texts.config import LONGEST_WINDOW

_MEMORY = 0.98
"""Of what passes took, by every further one
(`bench/claims/serving/company.py BUNDLE --rounds 0 --arriving 1500 --with _MEMORY=0.8`)."""
_ASSUMED = np.array([[0, 1, -1, 0], [0, 0, 0, 1], [-1 / LONGEST_WINDOW, -1 / LONGEST_WINDOW, 1, 0]])
"""What is 0 as long as nothing was seen: what a text takes less a row of a prompt, what such rows take more behind
others, and such a row less its share of a pass of one text, of which as many as the longest window take all."""
_ASSUMED_SQUARES = _ASSUMED.T @ _ASSUMED
_ASSUMED_GUESSES = 30.0
"""Square of how many more guesses are assumed to have been seen to take what rows were measured to take alone
(`bench/studies/company/guesses.py --with _ASSUMED_GUESSES=3`: 0.98 to 1.00, the slowest run 0.92 to 1.05)."""


class _Seen(NamedTuple):
    """A pass: its seconds, texts and guesses, rows of prompts, and how many tokens these had before them in all."""

    seconds: float
    num_texts: int
    num_guesses: int
    num_read: int
    looked_at: int


class PassTimes:
    """What passes take: a sum of what any takes, each text that is written, and each row of a prompt.

    A prompt's row takes more the more tokens are before it. All is fitted to the passes so far, by least squares of
    relative errors, so that one that was held up counts little. What none of them says is as if a single pass had said
    it (`_ASSUMED`).

    A guess takes a share of a pass of one text. That is learned from pass to pass, by how much longer the one with more
    guesses took. The machine's pace changes, and passes of a slow time and a fast one, compared with each other, would
    book that on the guesses.
    """

    def __init__(self, row_share: float = 0.0) -> None:
        """Assume `row_share`, of a pass alone what a row more was measured to take; 0 where nobody knows."""
        self._assumed_share = max(row_share, 1 / LONGEST_WINDOW)
        num_parts = len(_ASSUMED_SQUARES)
        self._squares, self._sums = np.zeros((num_parts, num_parts)), np.zeros(num_parts)
        self._parts = [0.0] * num_parts
        self._changes = self._square_changes = 0.0
        self._last: _Seen | None = None

    def observe(self, seconds: float, passes: Sequence[TargetPass]) -> None:
        """These together took so long."""
        written = [len(one.tokens) for one in passes if one.with_logits is not None]
        read = [(len(one.tokens), one.start) for one in passes if one.with_logits is None]
        num_read, looked_at = sum(rows for rows, _ in read), sum(rows * start for rows, start in read)
        seen = _Seen(max(seconds, 1e-9), len(written), sum(written) - len(written), num_read, looked_at)
        if self._last is not None:
            self._compare(self._last, seen)
        self._last = seen
        rate = (1 + self.share * self._beside_fitted(seen)[1]) / seen.seconds
        row = rate * np.array([1, seen.num_texts, num_read, looked_at])
        self._squares = _MEMORY * self._squares + np.outer(row, row)
        self._sums = _MEMORY * self._sums + row
        found = np.linalg.solve(self._squares + rate**2 * _ASSUMED_SQUARES, self._sums)
        self._parts = [max(part, 0.0) for part in found.tolist()]

    def _compare(self, before: _Seen, after: _Seen) -> None:
        """Learn from two passes that followed each other, at one pace."""
        (pace, num_guesses), (pace_after, num_after) = (self._beside_fitted(one) for one in (before, after))
        change = 2 * (pace_after - pace) / (pace_after + pace)
        more = (num_after - num_guesses) / (1 + self.share * (num_guesses + num_after) / 2)
        self._changes = _MEMORY * self._changes + change * more
        self._square_changes = _MEMORY * self._square_changes + more**2

    def _beside_fitted(self, one: _Seen) -> tuple[float, float]:
        """A pass's time over that of its texts and prompts as fitted, and guesses by as much as these are more."""
        of_prompts = one.num_read * self._parts[2] + one.looked_at * self._parts[3]
        fitted = max(self.of_texts(one.num_texts) + of_prompts, 1e-9)
        return one.seconds / fitted, one.num_guesses * self.of_texts(1) / fitted

    @property
    def share(self) -> float:
        """What a guess takes, of a pass of one text without any."""
        assumed = _ASSUMED_GUESSES * self._assumed_share
        return max((self._changes + assumed) / (self._square_changes + _ASSUMED_GUESSES), 0.0)

    def of_texts(self, num_written: int) -> float:
        """Seconds of a pass of so many, without guesses or prompts; 0 where that is not known."""
        return self._parts[0] + num_written * self._parts[1]

    @property
    def of_guess(self) -> float:
        """Seconds of a guess; 0 where that is not known."""
        return self.share * self.of_texts(1)

    def of_prompt_row(self, start: int) -> float:
        """Seconds of a row of a prompt behind so many tokens; 0 where that is not known."""
        return self._parts[2] + start * self._parts[3]
