"""The passes by which a text is fed to exported stages: all at once, row by row, in windows whose end is rejected.

Owns: what a pass feeds, and which passes cover a text. Does not own: running them (`target.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

_WINDOWS, _WINDOW, _REJECTED = 2, 6, 3
"""Passes of a window, its rows, wrong ones behind every second: a large model's pass takes seconds here. Enough to find
what `pytest tests/parity/test_broken_graphs.py` breaks."""


class Pass(NamedTuple):
    """Feed `ids` behind the first `start` cached rows; the first `num_kept` rows are compared and kept."""

    start: int
    ids: tuple[int, ...]
    num_kept: int


def plan_passes(ids: tuple[int, ...], num_windows: int = _WINDOWS) -> Iterator[Pass]:
    """Cover `ids`: half by one prefill, a row alone, some by windows whose end is rejected, the rest at once.

    A window of 6 keeps 6; the next one adds 3 wrong rows, which `seqlens_k` rolls back, and `num_rows` for states.
    """
    half = len(ids) // 2
    first_window = half + min(len(ids) // 4, 1)
    behind = min(len(ids), first_window + num_windows * _WINDOW)
    yield Pass(0, ids[:half], half)
    if half < first_window:
        yield Pass(half, ids[half:first_window], 1)
    for number, start in enumerate(range(first_window, behind, _WINDOW)):
        kept = ids[start : min(start + _WINDOW, behind)]
        wrong = ids[:_REJECTED] if number % 2 else ()
        yield Pass(start, (*kept, *wrong), len(kept))
    if behind < len(ids):
        yield Pass(behind, ids[behind:], len(ids) - behind)
