"""Windows that need no draft: how the text went on the last time that it stood as it does now.

How good such a guess is depends on how long the two places agree, and is learned (`policy/windows`).
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.protocol import Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.request import Acceptance, Request, StepRecord
from mirrorsd.runtime.decoding.step import FreeRows
from mirrorsd.texts.config import LONGEST_WINDOW


class Repeats:
    """What the text has said before, where that is worth more than a window of the draft, and else in `free_rows`."""

    def __init__(self, request: Request, row_group: int) -> None:
        self._request, self.free_rows = request, FreeRows(request, row_group)

    def watch(self, *, is_wanted: bool) -> None:
        """Whether anybody looks after the next token; what free rows hold is looked for in any case."""
        if self._request.repeats is not None:
            self._request.repeats.watch(is_wanted=is_wanted or self.free_rows.row_group > 1)

    def offer(self, least: float) -> NDArray[np.int64] | None:
        """What followed the last time, if that is worth more than `least` tokens."""
        request, windows, repeats = self._request, self._request.windows, self._request.repeats
        if repeats is None or windows is None:
            return None
        limit = request.window_limit(None if request.speculation.pad_rows_to else LONGEST_WINDOW)
        count = windows.cut_repeat(repeats.reach, limit, least)
        return repeats.window(count) if count else None


class LookupSource(WindowSource):
    """Takes every window from the text itself, and drafts none: what fits into free rows, and more where it pays.

    Where nobody knows what rows cost, windows are as long as they may be.
    """

    name = "lookup"

    def __init__(self, request: Request, row_group: int) -> None:
        self._request = request
        most = row_group if request.windows is not None else 1 + request.speculation.gamma
        self._repeats = Repeats(request, most)

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self._window()

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """How the text went on the last time."""
        window = self._window()
        return Found(window, "text") if len(window) else Found()

    def _window(self) -> NDArray[np.int64]:
        repeat = self._repeats.offer(0.0)
        return self._repeats.free_rows.guess() if repeat is None else repeat

    def observe(self, step: StepRecord) -> None:
        """What the text's speed makes of a row."""
        if self._request.windows is not None:
            self._request.windows.observe(step.num_window, step.num_accepted, step.own_seconds)
