"""Learning rates over a budget of training seconds: warm-up (by steps), stable, decay.

Owns: the shape of the schedule and the clock that counts training seconds.
Does not own: optimisers, saving (`checkpoints.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mirrorsd.graphs.errors import ConfigError

__all__ = ["TrainingClock", "WarmStableDecay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStableDecay:
    """The learning rate as a share of its peak, over a budget of training seconds.

    The warm-up follows the steps, so that steps made again after a kill have the rates they had. Only where the steps
    are so slow that it would outlast a tenth of the budget does it follow the seconds.

    Attributes:
        budget_s: Length of the whole training in seconds of training.
        warm_steps: Steps of linear warm-up; 0: none.
        decay_s: Seconds of linear decay to zero at the end.
    """

    budget_s: float
    warm_steps: int = 50
    decay_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("budget_s", "warm_steps", "decay_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"WarmStableDecay.{name} is {getattr(self, name)}; it must be 0 or more")
        if self.decay_s > self.budget_s:
            raise ConfigError(
                f"WarmStableDecay.budget_s is {self.budget_s}; it must hold decay_s {self.decay_s}: give a longer "
                "budget"
            )

    def share(self, trained_s: float, step: int) -> float:
        """Return the share of the peak rate for the step after `step` steps and `trained_s` seconds.

        >>> schedule = WarmStableDecay(budget_s=100, warm_steps=50, decay_s=40)
        >>> [schedule.share(second, step=9 * second) for second in (1, 5, 30, 80, 100)]
        [0.2, 0.92, 1.0, 0.5, 0.0]
        >>> schedule.share(5, step=1)  # slow steps: half a tenth of the budget is over
        0.5
        """
        warm = max((step + 1) / self.warm_steps, 10 * trained_s / self.budget_s) if self.warm_steps else 1.0
        decay = (self.budget_s - trained_s) / self.decay_s if self.decay_s else float(trained_s < self.budget_s)
        return max(0.0, min(1.0, warm, decay))

    def is_decaying(self, trained_s: float) -> bool:
        """Say whether the decay has begun."""
        return trained_s >= self.budget_s - self.decay_s


class TrainingClock:
    """Count seconds of training so that a pause of the process does not count.

    A step that takes far longer than usual (the process was stopped) counts as a usual step. Two in a row are no pause
    but a slower machine: the shorter one is the usual step from then on. The first step after a start counts nothing:
    it is mostly compilation.
    """

    def __init__(self, trained_s: float = 0.0, *, outlier: float = 4.0, counts_cpu: bool = False) -> None:
        """Start at `trained_s`; a step longer than `outlier` usual steps is taken for a pause.

        With `counts_cpu` the seconds are those of a core in this process: on a machine that others use too, two runs
        of the same length then did the same work.
        """
        self.trained_s = trained_s
        self._outlier = outlier
        self._usual_s: float | None = None
        self._paused_s: float | None = None
        self._is_first = True
        self._now = time.process_time if counts_cpu else time.monotonic
        self._last = self._now()

    def tick(self) -> float:
        """Count one step, and return the seconds it took."""
        now = self._now()
        step_s, self._last = now - self._last, now
        return self.count(step_s)

    def count(self, step_s: float) -> float:
        """Count a step that took `step_s` seconds."""
        if self._is_first:
            self._is_first = False
            return step_s
        if self._usual_s is None:
            self._usual_s = step_s
        is_long, before = step_s >= self._outlier * self._usual_s, self._paused_s
        self._paused_s = step_s if is_long else None
        if is_long and before is not None:
            self._usual_s = min(before, step_s)
        counted = step_s if step_s < self._outlier * self._usual_s else self._usual_s
        self._usual_s = 0.9 * self._usual_s + 0.1 * counted
        self.trained_s += counted
        return step_s
