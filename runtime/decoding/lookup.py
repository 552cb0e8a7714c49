"""Windows that need no draft: how the text went on the last time that it stood as it does now.

How good such a guess is depends on how long the two places agree, and is learned (`policy/windows`).
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.target_link import Acceptance
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.texts.config import LONGEST_WINDOW


class FreeRows(WindowSource):
    """Plain decoding: no window, but what fits into the rows that the target computes anyway (`row_group`)."""

    name = "plain"

    def __init__(self, request: Request, row_group: int = 1) -> None:
        self._request, self._row_group = request, row_group

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self.guess()

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What free rows hold."""
        return Found(self.guess())

    def guess(self) -> NDArray[np.int64]:
        """How the text went on before, as far as rows are free."""
        repeats, count = self._request.repeats, min(self._row_group - 1, self._request.window_limit())
        return repeats.window(count) if repeats is not None and count > 0 else NO_TOKENS

    def observe(self, step: StepRecord) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """Nothing is ever left running."""


class Repeats:
    """What the text has said before, where that is worth more than a window of the draft."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def offer(self, least: float) -> NDArray[np.int64] | None:
        """What followed the last time, if that is worth more than `least` tokens."""
        request, windows, repeats = self._request, self._request.windows, self._request.repeats
        if repeats is None or windows is None:
            return None
        limit = request.window_limit(None if request.speculation.pad_rows_to else LONGEST_WINDOW)
        reach = repeats.reach(2 * limit + 1)
        count = windows.cut_repeat(reach, limit, least) if reach else 0
        return repeats.window(count) if count else None


class LookupSource(WindowSource):
    """Takes every window from the text itself, and drafts none: what fits into free rows, and more where it pays.

    Where nobody knows what rows cost, windows are as long as they may be.
    """

    name = "lookup"

    def __init__(self, request: Request, row_group: int) -> None:
        self._request = request
        most = row_group if request.windows is not None else 1 + request.gamma
        self._repeats, self._free_rows = Repeats(request), FreeRows(request, most)

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self._window()

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """How the text went on the last time."""
        window = self._window()
        return Found(window, "text") if len(window) else Found()

    def _window(self) -> NDArray[np.int64]:
        repeat = self._repeats.offer(0.0)
        return self._free_rows.guess() if repeat is None else repeat

    def observe(self, step: StepRecord) -> None:
        """What the text's speed makes of a row."""
        if self._request.windows is not None:
            self._request.windows.observe(step.num_window, step.num_accepted, step.own_seconds)

    def close(self) -> None:
        """Nothing is ever left running."""
