"""`[pace]`: the speed of hardware that is not there. Real tokens, threads and waiting; only the stage times are set.

A paced stage call takes at least as long as its card says. Nothing else changes, so whatever is generated is the
target's text as always; every report of a paced run says that it was paced.
"""

from dataclasses import dataclass
from itertools import pairwise

from mirrorsd.graphs.errors import ConfigError

Curve = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times in milliseconds.

    Attributes:
        target_ms: `[rows, ms]` points of a whole target pass, exits left out; straight lines between them and beyond.
        exit_ms: one exit, whatever the rows.
        draft_ms: `[rows, ms]` points of a draft round.
        transfer_ms: one hand-over between the devices.
        prefill_ms_per_row: each prompt token, on either device.
    """

    target_ms: Curve
    draft_ms: Curve
    exit_ms: float = 0.0
    transfer_ms: float = 0.0
    prefill_ms_per_row: float = 0.0

    def head_ms(self, read_share: float, num_rows: int, *, is_prompt: bool = False) -> float:
        """What a head takes over `num_rows` rows: its share of what the target takes for them.

        Args:
            read_share: weights that it reads, over those of a pass of the target.
            num_rows: rows that it reads.
            is_prompt: whether they are the prompt's; only the guesses behind the last one take a pass's time then.

        >>> pace = Pace(target_ms=((1.0, 21.0), (8.0, 24.5)), draft_ms=((1.0, 6.0),), prefill_ms_per_row=0.1)
        >>> pace.head_ms(0.1, 3), pace.head_ms(0.1, 50, is_prompt=True)
        (2.2, 2.6)
        """
        if is_prompt:
            return read_share * (interpolate(self.target_ms, 1) + self.prefill_ms_per_row * num_rows)
        return read_share * interpolate(self.target_ms, num_rows)

    def __post_init__(self) -> None:
        """Check that the curves are curves and no time is negative."""
        for name in ("target_ms", "draft_ms"):
            check_curve(f"pace.{name}", getattr(self, name))
        for name in ("exit_ms", "transfer_ms", "prefill_ms_per_row"):
            if getattr(self, name) < 0:
                raise ConfigError(f"pace.{name} is {getattr(self, name)}; allowed: 0 or more.")


def check_curve(field: str, curve: Curve) -> None:
    """Refuse anything but `[rows, ms]` points with rising rows.

    Raises:
        ConfigError: no point, a point of another length, rows that do not rise, a negative time.
    """
    rows = [point[0] for point in curve if len(point) == 2]
    is_fine = len(rows) == len(curve) > 0 and all(a < b for a, b in pairwise(rows))
    if not is_fine or any(point[1] < 0 for point in curve):
        raise ConfigError(f"{field} is {[list(p) for p in curve]}; expected [rows, ms] points with rising rows.")


def interpolate(curve: Curve, rows: int) -> float:
    """Milliseconds for `rows` rows.

    >>> interpolate(((1.0, 21.0), (8.0, 24.5)), 3), interpolate(((1.0, 21.0), (8.0, 24.5)), 10)
    (22.0, 25.5)
    """
    if len(curve) == 1:
        return curve[0][1]
    index = next((i for i in range(1, len(curve) - 1) if rows <= curve[i][0]), len(curve) - 1)
    (low_rows, low_ms), (high_rows, high_ms) = curve[index - 1], curve[index]
    return max(0.0, low_ms + (high_ms - low_ms) * (rows - low_rows) / (high_rows - low_rows))
