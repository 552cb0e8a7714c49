"""What a step of plain decoding takes, by what other passes of the target take.

Owns: that one comparison. Does not own: what follows from it (`account`).
"""

from collections import deque
from statistics import median

from mirrorsd.runtime.ledger import TIME_MEMORY

_STEPS = 16
"""Plain steps that are compared with the first pass of speculation after them; a quarter of them with its last ones
before them. 8 and 32: 1.00 (`bench/studies/constants.py`)."""


class PlainPace:
    """Seconds per step of plain decoding, by the slowdown of other passes of the target.

    Attributes:
        reference: seconds per step where the target is as fast as `tune` measured it; 0: nothing was measured.
    """

    def __init__(self, reference: float = 0.0) -> None:
        self.reference = reference
        self._num_compared = 0
        self._slowdown = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def observe_plain(self, seconds: float) -> None:
        """Learn from a step of plain decoding beside which nothing ran."""
        self._steps.append(seconds)
        if self._slowdown and len(self._steps) == _STEPS // 4:
            self._compare(self._slowdown)
            self._slowdown = 0.0

    def observe_pass(self, slowdown: float) -> float:
        """Learn that a pass took `slowdown` times what `tune` measured; return what a plain step would have taken."""
        if self._steps:
            self._compare(slowdown)
            self._steps.clear()
            self._slowdown = 0.0
        self._slowdown = TIME_MEMORY * (self._slowdown or slowdown) + (1 - TIME_MEMORY) * slowdown
        return slowdown * self.reference

    def _compare(self, slowdown: float) -> None:
        if not self.reference:
            return
        self._num_compared += 1
        share = max(1 / self._num_compared, 1 - TIME_MEMORY)
        self.reference += share * (median(self._steps) / slowdown - self.reference)
