"""What a step of plain decoding would take now, while speculation runs instead: the measure of all it gains or loses.

Every step of serial decoding shows how much slower the target's passes are than `tune` measured. How plain decoding
compares with such passes is learned only where one takes over from the other: there both were measured on the machine
as it was at that moment. A machine that slows down in between is not mistaken for dear plain decoding.
"""

from collections import deque
from statistics import median

__all__ = ["PlainPace"]

_MEMORY = 0.8
"""Of the passes' slowdown, from step to step."""
_STEPS_BEFORE, _STEPS_AFTER = 16, 4
"""Plain steps that are compared with the first pass of speculation after them, and with its last ones before them."""
_LEAST_SHARE = 0.125
"""What a comparison changes at least; the first replaces what `tune` measured, the second half of that, and so on."""


class PlainPace:
    """Seconds per step of plain decoding, by the slowdown of other passes of the target.

    Attributes:
        reference: seconds per step where the target is as fast as `tune` measured it; 0: nothing was measured.
    """

    def __init__(self, reference: float = 0.0) -> None:
        self.reference = reference
        self._num_compared = 0
        self._slowdown = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS_BEFORE)

    def observe_plain(self, seconds: float) -> None:
        """Learn from a step of plain decoding beside which nothing ran."""
        self._steps.append(seconds)
        if self._slowdown and len(self._steps) == _STEPS_AFTER:
            self._compare(self._slowdown)
            self._slowdown = 0.0

    def observe_pass(self, slowdown: float) -> float:
        """Learn that a pass took `slowdown` times what `tune` measured; return what a plain step would have taken."""
        if self._steps:
            self._compare(slowdown)
            self._steps.clear()
            self._slowdown = 0.0
        self._slowdown = _MEMORY * (self._slowdown or slowdown) + (1 - _MEMORY) * slowdown
        return slowdown * self.reference

    def _compare(self, slowdown: float) -> None:
        if not self.reference:
            return
        self._num_compared += 1
        share = max(1 / self._num_compared, _LEAST_SHARE)
        self.reference += share * (median(self._steps) / slowdown - self.reference)
