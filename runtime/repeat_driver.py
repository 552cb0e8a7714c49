"""Serial decoding as `auto` runs it: a window is the text's own repetition where that is worth more than drafting."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.acceptance import Acceptance
from mirrorsd.runtime.draft_link import DraftLink
from mirrorsd.runtime.drivers import InFlight, SerialDriver
from mirrorsd.runtime.repeats import RepeatedText
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.target_link import TargetLink

_LONGEST = 31
"""Most tokens of a window that costs no drafting: with the head's, what `tune` measures passes of."""


class RepeatDriver(SerialDriver):
    """Serial decoding that does not ask the draft for what the text has said before.

    `method = "serial"` always asks the draft: that is what other methods are compared with.
    """

    def __init__(self, request: Request, target: TargetLink, draft: DraftLink, passes: int) -> None:
        super().__init__(request, target, draft, passes)
        self._repeats: RepeatedText | None = None

    def _next_window(self, inflight: InFlight, acceptance: Acceptance) -> tuple[NDArray[np.int64], str]:
        """What followed the last time, if that is likely enough; otherwise ask the draft and wait for its answer."""
        request = self.request
        if request.length is None or not request.window_limit() or not self.draft.is_working():
            return super()._next_window(inflight, acceptance)
        if self._repeats is None:
            self._repeats = RepeatedText(request.length.repeat_chances, request.num_prompt)
        self._repeats.follow(request.tokens)
        limit = request.window_limit(None if request.speculation.pad_rows_to else _LONGEST)
        count = request.length.cut_repeat(self._repeats.reach(limit))
        if not count:
            drafted_s = request.ledger.drafted_s
            found = super()._next_window(inflight, acceptance)
            request.length.observe_drafting(request.ledger.drafted_s - drafted_s)
            return found
        window = self._repeats.window(request.tokens, count)
        num_accepted, token = acceptance.num_accepted, acceptance.next_token
        self.draft.hold(partial(self.draft.drafter.adopt, inflight.head, num_accepted, token, window))
        return window, "text"
