"""Plain decoding, and what every decoder is: a step verifies one window and finds the next."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import TargetOutput
from mirrorsd.runtime.decoding.acceptance import Acceptance, accept_window
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.target_link import TargetLink
from mirrorsd.runtime.devices.workers import Ticket
from mirrorsd.runtime.draft.chain import NO_TOKENS
from mirrorsd.runtime.sampling.chooser import graph_choice


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


class Decoder(Protocol):
    """What the generation loop needs: the three methods, and `auto` which switches between them."""

    name: str
    request: Request

    def start(self) -> InFlight:
        """Prefill; the first window to verify."""

    def step(self, inflight: InFlight) -> Outcome:
        """Verify, commit, find the next window."""

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""


class PlainDecoder:
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
