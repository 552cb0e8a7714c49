"""Plain and serial decoding; `mirror_driver` has the third method, as a sibling that shares every helper.

`step(inflight) -> outcome` verifies one window and finds the next one; the window in flight is the loop's only state
besides the caches and the text. Which tokens come out never depends on the driver.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.acceptance import Acceptance, accept_window
from mirrorsd.runtime.choosing import graph_choice
from mirrorsd.runtime.draft_chain import NO_TOKENS
from mirrorsd.runtime.draft_link import DraftLink
from mirrorsd.runtime.request import Request, StepRecord
from mirrorsd.runtime.target_link import TargetLink
from mirrorsd.runtime.target_session import TargetOutput
from mirrorsd.runtime.window_length import WindowOrder
from mirrorsd.runtime.workers import Ticket

_SIDE_PASSES = 3


class InFlight(NamedTuple):
    """The next thing to verify: the head token stands at position `head`, `window` follows it."""

    head: int
    window: NDArray[np.int64]


class Outcome(NamedTuple):
    """One step's committed tokens (accepted window tokens, then the target's own) and what to verify next."""

    tokens: list[int]
    num_accepted: int
    inflight: InFlight
    method: str


class Driver(Protocol):
    """What the generation loop needs: the three methods, and `auto` which switches between them."""

    name: str
    request: Request

    def start(self) -> InFlight:
        """Prefill; the first window to verify."""

    def step(self, inflight: InFlight) -> Outcome:
        """Verify, commit, find the next window."""

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""


class PlainDriver:
    """One token per target pass: the reference that the other methods must reproduce."""

    name = "plain"

    def __init__(self, request: Request, target: TargetLink) -> None:
        self.request = request
        self.target = target

    def start(self) -> InFlight:
        """Prefill everything but the last prompt token, which is the first head token."""
        self._prefill_target()
        return InFlight(self.request.num_tokens - 1, NO_TOKENS)

    def step(self, inflight: InFlight) -> Outcome:
        """Verify the window in flight, commit what the target says, find the next window."""
        started = self.request.ledger.now()
        ticket = self._run_target(inflight)
        self.request.chooser.draw_ahead(inflight.head + 1, len(inflight.window) + 1, self.target.vocab_size)
        output = self.target.result(self.request, ticket)
        acceptance = self._accept(inflight, output)
        tokens = self._commit(inflight, acceptance)
        drafted_s = self.request.ledger.drafted_s
        window, source = self._next_window(inflight, acceptance)
        if ticket.queued_s:  # the next pass would have to queue, too, so that drafting its window costs nothing
            self.request.ledger.queued_s += ticket.queued_s + self.request.ledger.drafted_s - drafted_s
        num_accepted = acceptance.num_accepted
        step = StepRecord(started, self.request.ledger.now(), len(inflight.window), num_accepted, source, self.name)
        self.request.record(step)
        return Outcome(tokens, num_accepted, InFlight(inflight.head + len(tokens), window), self.name)

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""

    def _prefill_target(self) -> None:
        """Let the target read the prompt; from here on time counts as decoding, the first drafting included."""
        self.target.prefill(self.request)
        if not self.request.steps:  # reading again in the middle of a text is part of decoding it
            self.request.prefilled = self.request.ledger.now()

    def _run_target(self, inflight: InFlight) -> Ticket[TargetOutput]:
        return self.target.submit(self.request, inflight.head, inflight.window)

    def _accept(self, inflight: InFlight, output: TargetOutput) -> Acceptance:
        """Compare the window with the target's choices, row by row."""
        request, head = self.request, inflight.head
        if not request.chooser.needs_logits:
            ids, gaps = output.argmax_ids.tolist(), output.argmax_gap.tolist()
            return accept_window(inflight.window, lambda row: graph_choice(ids[row], gaps[row], head + 1 + row))
        text = request.text_with(inflight.window)
        logits = output.logits
        assert logits is not None
        return accept_window(
            inflight.window,
            lambda row: request.chooser.choose(logits[row], head + 1 + row, text[: head + 1 + row]),
        )

    def _commit(self, inflight: InFlight, acceptance: Acceptance) -> list[int]:
        tokens = [*inflight.window[: acceptance.num_accepted].tolist(), acceptance.next_token]
        self.request.commit(tokens, acceptance.gaps, self.target.near_tie_gap)
        self.target.keep(self.request, inflight.head + acceptance.num_accepted + 1)
        return tokens

    def _next_window(self, inflight: InFlight, acceptance: Acceptance) -> tuple[NDArray[np.int64], str]:
        return NO_TOKENS, "none"


class SerialDriver(PlainDriver):
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
        if self.request.length is not None:
            done = self.request.steps[-1]
            own_s = done.ended - done.started - (self.request.ledger.queued_s - queued_s)
            self.request.length.observe(done.num_window, done.num_accepted, own_s)
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
        return WindowOrder(self.request.window_limit(), self.passes, self.request.length)

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
