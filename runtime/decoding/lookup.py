"""Serial and mirror decoding as `auto` runs them: a window is the text's own repetition where that is worth more.

`method = "serial"` and `"mirror"` always take the draft's windows: they are what is compared.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.draft_link import DraftLink
from mirrorsd.runtime.decoding.mirror import MirrorDecoder
from mirrorsd.runtime.decoding.plain import InFlight, Outcome, PlainDecoder
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.serial import SerialDecoder
from mirrorsd.runtime.decoding.target_link import TargetLink
from mirrorsd.runtime.draft.chain import NO_TOKENS
from mirrorsd.runtime.policy.repeats import RepeatedText, TextLookup
from mirrorsd.runtime.policy.roots import RootPlanner

__all__ = ["FreeRowDecoder"]


class FreeRowDecoder(PlainDecoder):
    """One target pass a step, with nothing in flight but what fits into the rows of its last group."""

    def __init__(self, request: Request, target: TargetLink) -> None:
        super().__init__(request, target)
        self._lookup = TextLookup()

    def step(self, inflight: InFlight) -> Outcome:
        """As in plain decoding; a window that is in flight already is verified as it is."""
        return super().step(inflight if len(inflight.window) else inflight._replace(window=self._guess()))

    def _guess(self) -> NDArray[np.int64]:
        count = min(self.target.row_group - 1, self.request.window_limit())
        return self._lookup.guess(self.request.tokens, count) if count > 0 else NO_TOKENS


_LONGEST = 31
"""Most tokens of a window that costs no drafting: with the head's, what `tune` measures passes of."""


class _Repeating(SerialDecoder):
    """Does not take from the draft what the text has said before."""

    repeats: RepeatedText | None = None
    _prepares_windows = False
    _is_repeat = False

    def _next_window(self, inflight: InFlight, acceptance: Acceptance) -> tuple[NDArray[np.int64], str]:
        """What followed the last time, if that is likely enough; otherwise the draft's window."""
        request, repeats = self.request, self.repeats
        can_adopt = self.draft.has_text and self.draft.is_working()
        if request.windows is None or repeats is None or not request.window_limit() or not can_adopt:
            return super()._next_window(inflight, acceptance)
        repeats.follow(request.tokens)
        limit = request.window_limit(None if request.speculation.pad_rows_to else _LONGEST)
        count = request.windows.cut_repeat(repeats.reach(limit), self._lost_seconds())
        is_unprepared, self._is_repeat = self._prepares_windows and self._is_repeat, count > 0
        if not count:
            drafted_s = request.ledger.drafted_s
            found = super()._next_window(inflight, acceptance)
            if not is_unprepared:
                request.windows.observe_drafting(request.ledger.drafted_s - drafted_s)
            return found
        window = repeats.window(request.tokens, count)
        num_accepted, token = acceptance.num_accepted, acceptance.next_token
        self.draft.hold(partial(self.draft.drafter.adopt, inflight.head, num_accepted, token, window))
        return window, "text"

    def _lost_seconds(self) -> float:
        """What drafting takes after a repeat has failed that would have been over by then after a drafted window."""
        return self.passes * self.draft.round_seconds if self._prepares_windows else 0.0


class RepeatSerialDecoder(_Repeating):
    """Serial decoding with repeats."""


class RepeatMirrorDecoder(_Repeating, MirrorDecoder):
    """Mirror decoding with repeats. Behind one the draft has prepared nothing, as it has not read it."""

    _prepares_windows = True


def repeating_decoders(
    request: Request, target: TargetLink, draft: DraftLink, passes: int, planner: RootPlanner
) -> tuple[RepeatSerialDecoder, RepeatMirrorDecoder]:
    """Both, on one text."""
    serial = RepeatSerialDecoder(request, target, draft, passes)
    mirror = RepeatMirrorDecoder(request, target, draft, passes, planner)
    if request.windows is not None:
        serial.repeats = mirror.repeats = RepeatedText(request.windows.repeat_chances, request.num_prompt)
    return serial, mirror
