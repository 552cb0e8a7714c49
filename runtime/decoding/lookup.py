"""Windows that need no draft: how the text went on the last time that it stood as it does now."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.mirror import MirrorSource
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.serial import SerialSource
from mirrorsd.runtime.decoding.step import Beside, Found, InFlight
from mirrorsd.runtime.draft.chain import NO_TOKENS
from mirrorsd.runtime.policy.repeats import RepeatedText, TextLookup

_LONGEST = 31
"""Most tokens of a window that costs no drafting: with the head's, what `tune` measures passes of."""


class FreeRows:
    """Plain decoding: no window, but what fits into the rows that the target computes anyway (`row_group`)."""

    name = "plain"

    def __init__(self, request: Request, row_group: int = 1) -> None:
        self._request, self._row_group = request, row_group
        self._lookup = TextLookup()

    def start(self, read_prompt: Callable[[], None]) -> NDArray[np.int64]:
        """See `WindowSource.start`."""
        read_prompt()
        return self.guess()

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What free rows hold."""
        return Found(self.guess())

    def guess(self) -> NDArray[np.int64]:
        """How the text went on before, as far as rows are free."""
        count = min(self._row_group - 1, self._request.window_limit())
        return self._lookup.guess(self._request.tokens, count) if count > 0 else NO_TOKENS

    def observe(self, step: StepRecord) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """Nothing is ever left running."""


class RepeatSource:
    """What the text has said before, where that is worth more than the draft's window; otherwise the draft's.

    `method = "serial"` and `"mirror"` always take the draft's windows: they are what is compared.
    """

    def __init__(
        self, serial: SerialSource, drafting: SerialSource | MirrorSource, repeats: RepeatedText | None
    ) -> None:
        self.name = drafting.name
        self._serial, self._drafting, self._repeats = serial, drafting, repeats
        self._prepares = isinstance(drafting, MirrorSource)
        self._is_repeat = False

    def start(self, read_prompt: Callable[[], None]) -> NDArray[np.int64]:
        """See `WindowSource.start`."""
        return self._drafting.start(read_prompt)

    def begin(self, inflight: InFlight) -> Beside | None:
        """See `WindowSource.begin`."""
        return self._drafting.begin(inflight)

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What followed the last time, if that is likely enough; otherwise the draft's window."""
        request, repeats, draft = self._serial.request, self._repeats, self._serial.draft
        can_adopt = draft.has_text and draft.is_working()
        if request.windows is None or repeats is None or not request.window_limit() or not can_adopt:
            return self._drafting.next(inflight, acceptance)
        repeats.follow(request.tokens)
        limit = request.window_limit(None if request.speculation.pad_rows_to else _LONGEST)
        count = request.windows.cut_repeat(repeats.reach(limit), self._lost_seconds())
        was_repeat, self._is_repeat = self._is_repeat, count > 0
        if count:
            window = repeats.window(request.tokens, count)
            self._serial.adopt(inflight, acceptance, window)
            return Found(window, "text")
        drafted_s = request.ledger.drafted_s
        found = self._drafting.next(inflight, acceptance)
        if not (self._prepares and was_repeat):  # behind a repeat nothing is prepared, as the draft has not read it
            request.windows.observe_drafting(request.ledger.drafted_s - drafted_s)
        return found

    def _lost_seconds(self) -> float:
        """What drafting takes after a repeat has failed that would have been over by then after a drafted window."""
        return self._serial.passes * self._serial.draft.round_seconds if self._prepares else 0.0

    def observe(self, step: StepRecord) -> None:
        """See `WindowSource.observe`."""
        self._drafting.observe(step)

    def close(self) -> None:
        """See `WindowSource.close`."""
        self._drafting.close()
