"""Serial decoding: draft, then verify; both devices take turns. The ablation of what overlapping brings."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.draft_link import DraftLine
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import Acceptance, Found, InFlight, ReadPrompt
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.policy.windows import WindowOrder

_FEWEST_FORCED = 2
"""Tokens that a form leaves no choice of, from which on they are a better window than the draft's own."""


class SerialSource:
    """Asks the draft for every window, and waits."""

    name = "serial"

    def __init__(self, request: Request, draft: DraftLine, passes: int) -> None:
        self.request, self.draft, self.passes = request, draft, passes

    @property
    def order(self) -> WindowOrder:
        """What the draft is asked for now."""
        return WindowOrder(self.request.window_limit(), self.passes, self.request.windows)

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """Prefill target and draft at the same time; the first window is drafted meanwhile, if the draft is ready."""
        if self.draft.is_ready():
            self.post_prefill()
        read_prompt()
        return self.fresh_window() if self.draft.has_text else NO_TOKENS

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """Ask the draft and wait for its answer; plain decoding until it is ready."""
        order, forced = self.order, self.forced(inflight, acceptance)
        if forced is not None:
            return forced
        if not order.limit or not (self.draft.has_text or self.draft.is_ready()):
            return Found()
        if not self.draft.has_text:
            return Found(self.draft_window(), "fresh")
        num_accepted, token = acceptance.num_accepted, acceptance.next_token
        job = partial(self.draft.drafter.resolve, inflight.head, num_accepted, token, order)
        return self.allowed(Found(*self.draft.ask(job, (NO_TOKENS, "none"))))

    def forced(self, inflight: InFlight, acceptance: Acceptance) -> Found | None:
        """What a constrained text must say next, where that is enough for a window."""
        constraint = self.request.constraint
        if constraint is None or not (self.draft.has_text and self.draft.is_working()):
            return None
        forced = constraint.forced(self.request.window_limit())
        if len(forced) < _FEWEST_FORCED:
            return None
        self.adopt(inflight, acceptance, forced)
        return Found(forced, "forced")

    def allowed(self, found: Found) -> Found:
        """What of a window a constrained text may say; the draft forgets the rest."""
        request = self.request
        if request.constraint is None or not self.draft.is_working():
            return found
        window = found.window[: request.constraint.num_allowed(found.window)]
        self.draft.hold(partial(self.draft.drafter.chain.cut, request.num_tokens + len(window)))
        return found._replace(window=window)

    def adopt(self, inflight: InFlight, acceptance: Acceptance, window: NDArray[np.int64]) -> None:
        """Tell the draft, some time before it is asked again, that `window` goes on after `inflight`."""
        num_accepted, token = acceptance.num_accepted, acceptance.next_token
        self.draft.hold(partial(self.draft.drafter.adopt, inflight.head, num_accepted, token, window))

    def observe(self, step: StepRecord) -> None:
        """The lengths of windows learn from it."""
        if self.request.windows is not None:
            self.request.windows.observe(step.num_window, step.num_accepted, step.own_seconds)

    def close(self) -> None:
        """Nothing is ever left running."""

    def draft_window(self) -> NDArray[np.int64]:
        """Bring the draft up to the committed text, after steps without it, and draft a window."""
        self.post_prefill()
        return self.fresh_window()

    def post_prefill(self) -> None:
        """Let the draft read the text now, beside the target; where they take turns, before its next window."""
        request = self.request
        job = partial(self.draft.drafter.prefill, request.tokens.copy(), request.chooser, request.ledger)
        (self.draft.hold if self.draft.takes_turns else self.draft.release)(job)
        self.draft.has_text = True

    def is_prepared(self, acceptance: Acceptance) -> bool:
        """Whether the next window is there already: never."""
        return False

    def fresh_window(self) -> NDArray[np.int64]:
        """A window after the text that the draft knows."""
        order = self.order
        return self.draft.ask(partial(self.draft.drafter.fresh, order), NO_TOKENS) if order.limit else NO_TOKENS
