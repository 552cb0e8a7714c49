"""What a joint pass takes, by what is in it.

Owns: learning that from passes as they are run. Does not own: what follows from it (`company`).
"""

from collections.abc import Sequence

import numpy as np

from mirrorsd.runtime.ledger import TargetPass
from mirrorsd.texts.config import LONGEST_WINDOW

_MEMORY = 0.98
"""Of what passes took, by every further one
(`bench/claims/serving/company.py BUNDLE --rounds 0 --arriving 1500 --with _MEMORY=0.8`)."""
_ASSUMED = np.array(
    [[0, 1, -1, 0, 0], [0, 0, 1, -1, 0], [0, 0, 0, 0, 1], [-1 / LONGEST_WINDOW, -1 / LONGEST_WINDOW, 1, 0, 0]]
)
"""What is 0 as long as nothing was seen: what a text takes less a guess, a guess less a row of a prompt, what such rows
take more behind others, and a guess less its share of a pass of one text, of which the longest window takes all."""
_ASSUMED_SQUARES = _ASSUMED.T @ _ASSUMED


class PassTimes:
    """What passes take: a sum of what any takes, each text that is written, each guess, each row of a prompt.

    A prompt's row takes more the more tokens are before it. All is fitted to the passes so far, by least squares of
    relative errors, so that one that was held up counts little. What none of them says is as if a single pass had said
    it (`_ASSUMED`).
    """

    def __init__(self) -> None:
        num_parts = len(_ASSUMED_SQUARES)
        self._squares, self._sums = np.zeros((num_parts, num_parts)), np.zeros(num_parts)
        self._parts = [0.0] * num_parts

    def observe(self, seconds: float, passes: Sequence[TargetPass]) -> None:
        """These together took so long."""
        written = [len(one.tokens) for one in passes if one.with_logits is not None]
        read = [(len(one.tokens), one.start) for one in passes if one.with_logits is None]
        num_read, looked_at = sum(rows for rows, _ in read), sum(rows * start for rows, start in read)
        rate = 1 / max(seconds, 1e-9)
        row = rate * np.array([1, len(written), sum(written) - len(written), num_read, looked_at])
        self._squares = _MEMORY * self._squares + np.outer(row, row)
        self._sums = _MEMORY * self._sums + row
        found = np.linalg.solve(self._squares + rate**2 * _ASSUMED_SQUARES, self._sums)
        self._parts = [max(part, 0.0) for part in found.tolist()]

    def of_texts(self, num_written: int) -> float:
        """Seconds of a pass of so many, without guesses or prompts; 0 where that is not known."""
        return self._parts[0] + num_written * self._parts[1]

    @property
    def of_guess(self) -> float:
        """Seconds of a guess; 0 where that is not known."""
        return self._parts[2]

    def of_prompt_row(self, start: int) -> float:
        """Seconds of a row of a prompt behind so many tokens; 0 where that is not known."""
        return self._parts[3] + start * self._parts[4]
