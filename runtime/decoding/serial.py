"""Plain and serial decoding; `mirror` has the third method, as a sibling that shares every helper.

`step(inflight) -> outcome` verifies one window and finds the next one; the window in flight is the loop's only state
besides the caches and the text. Which tokens come out never depends on the decoder.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.draft_link import DraftLink
from mirrorsd.runtime.decoding.plain import InFlight, Outcome, PlainDecoder
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.target_link import TargetLink
from mirrorsd.runtime.draft.chain import NO_TOKENS
from mirrorsd.runtime.policy.windows import WindowOrder

_SIDE_PASSES = 3


class SerialDecoder(PlainDecoder):
    """Draft, then verify: both devices take turns. The ablation of what overlapping brings."""

    name = "serial"

    def __init__(self, request: Request, target: TargetLink, draft: DraftLink, passes: int) -> None:
        super().__init__(request, target)
        self.draft = draft
        self.passes = passes

    def start(self) -> InFlight:
        """Prefill target and draft at the same time; the first window is drafted meanwhile, if the draft is ready."""
        if self.draft.is_ready():
            self._post_prefill()
        self._prefill_target()
        window = self._fresh_window() if self.draft.has_text else NO_TOKENS
        return InFlight(self.request.num_tokens - 1, window)

    def step(self, inflight: InFlight) -> Outcome:
        """As in plain decoding; the lengths of windows learn from it."""
        queued_s = self.request.ledger.queued_s
        outcome = super().step(inflight)
        if self.request.windows is not None:
            done = self.request.steps[-1]
            own_s = done.ended - done.started - (self.request.ledger.queued_s - queued_s)
            self.request.windows.observe(done.num_window, done.num_accepted, own_s)
        return outcome

    def draft_window(self) -> NDArray[np.int64]:
        """Bring the draft up to the committed text, after steps without it, and draft a window."""
        self._post_prefill()
        return self._fresh_window()

    def post_window(self, receive: Callable[[NDArray[np.int64]], None]) -> None:
        """Have a short window after the text drafted, usually without waiting: `receive` is told on the draft's thread.

        One pass of a streaming draft, a few of an ordinary one: this window is a question, not a step. Where draft and
        target take turns it is waited for: beside passes of the target it would take several times as long, and slow
        them for all that time.
        """
        self._post_prefill()
        limit = self.request.window_limit()
        drafter = self.draft.drafter
        passes = 1 if drafter.session.shape.num_streams else min(self.passes, _SIDE_PASSES)
        job = partial(drafter.fresh, WindowOrder(limit, passes))
        if self.draft.takes_turns:
            receive(self.draft.ask(job, NO_TOKENS))
        else:
            self.draft.post(lambda: receive(job()))

    def _post_prefill(self) -> None:
        """Let the draft read the text now, beside the target; where they take turns, before its next window."""
        request = self.request
        job = partial(self.draft.drafter.prefill, request.tokens.copy(), request.chooser, request.ledger)
        (self.draft.hold if self.draft.takes_turns else self.draft.release)(job)
        self.draft.has_text = True

    def _fresh_window(self) -> NDArray[np.int64]:
        order = self._order()
        return self.draft.ask(partial(self.draft.drafter.fresh, order), NO_TOKENS) if order.limit else NO_TOKENS

    def _order(self) -> WindowOrder:
        return WindowOrder(self.request.window_limit(), self.passes, self.request.windows)

    def _next_window(self, inflight: InFlight, acceptance: Acceptance) -> tuple[NDArray[np.int64], str]:
        """Ask the draft and wait for its answer; plain decoding until it is ready."""
        order = self._order()
        if not order.limit or not (self.draft.has_text or self.draft.is_ready()):
            return NO_TOKENS, "none"
        if not self.draft.has_text:
            return self.draft_window(), "fresh"
        num_accepted, token = acceptance.num_accepted, acceptance.next_token
        job = partial(self.draft.drafter.resolve, inflight.head, num_accepted, token, order)
        return self.draft.ask(job, (NO_TOKENS, "none"))
