"""One step, whatever the method: verify the window in flight, commit what the target says, find the next window.

What varies is where the next window comes from: an object behind `WindowSource`. Which tokens come out never depends on
it. The window in flight is the loop's only state besides the caches and the text. The plainest sources are here too:
no window, and draft, then verify. The others fall back on them.
"""

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import ExitGuesses, TargetOutput
from mirrorsd.runtime.decoding.draft_link import DraftLink
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.target_link import (
    Acceptance,
    ChooseRow,
    RowReader,
    TargetLink,
    accept_tree,
    accept_window,
)
from mirrorsd.runtime.draft.tree import NO_TOKENS, BranchWindow
from mirrorsd.runtime.policy.siblings import NO_SIBLINGS, Known, SiblingChooser, Siblings
from mirrorsd.runtime.policy.windows import WindowLength, WindowOrder
from mirrorsd.runtime.sampling.chooser import graph_choice

FEWEST_FORCED = 2
"""Tokens that a form leaves no choice of, from which on they are a better window than the draft's own."""


class InFlight(NamedTuple):
    """The next thing to verify: the head token stands at position `head`, `window` follows it, `siblings` stand beside.

    The `num_again` tokens before the head were siblings, whose rows are not kept: they are fed once more.
    """

    head: int
    window: NDArray[np.int64]
    siblings: Siblings = NO_SIBLINGS
    num_again: int = 0

    def rows_of(self, acceptance: Acceptance) -> NDArray[np.int64]:
        """Rows of the pass that are text, the head token's first.

        >>> found = Acceptance(1, 4, (), aside=(5,), rows_aside=(3,))
        >>> InFlight(9, np.array([7, 8]), num_again=1).rows_of(found).tolist()
        [1, 2, 4]
        """
        return self.num_again + np.array([*range(1 + acceptance.num_accepted), *acceptance.rows_aside])


class Outcome(NamedTuple):
    """One step's committed tokens (accepted window tokens, then the target's own) and what to verify next."""

    tokens: list[int]
    num_accepted: int
    inflight: InFlight
    method: str


class Found(NamedTuple):
    """The next window; `source` as in `StepRecord.next_source`."""

    window: NDArray[np.int64] = NO_TOKENS
    source: str = "none"
    siblings: Siblings = NO_SIBLINGS


class Beside(Protocol):
    """What works beside one pass of the target; `is_listening` says whether it wants to hear the exits."""

    is_listening: bool

    def start(self) -> None:
        """The pass begins. Runs on the target's thread, just before its device starts."""

    def hear(self, guesses: ExitGuesses) -> None:
        """An exit has spoken. Runs on the target's thread, between its stages."""

    def end(self, acceptance: Acceptance) -> None:
        """The pass is over and verified. Runs on the scheduler's thread, as all of `WindowSource` does."""


class ReadPrompt(Protocol):
    """Has the target read the prompt, and `reader` what has been read."""

    def __call__(self, reader: RowReader | None = None) -> None:
        """Read it."""


class WindowSource(Protocol):
    """Where the next window comes from.

    Attributes:
        name: the method of the step that has begun last.
    """

    name: str

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """Have the target read the prompt, and get ready meanwhile; the first window."""

    def begin(self, inflight: InFlight) -> Beside | None:
        """A pass over `inflight` is about to begin: what works beside it; by itself nothing."""
        return None

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The window after `inflight`, which was verified and committed."""

    def observe(self, step: StepRecord) -> None:
        """Learn from the step, which is over; by itself nothing is learned."""
        return

    def close(self) -> None:
        """Leave nothing running; by itself nothing is."""
        return


class Decoder(Protocol):
    """What the generation loop needs."""

    name: str
    request: Request

    def start(self) -> InFlight:
        """Prefill; the first window to verify."""

    def step(self, inflight: InFlight) -> Outcome:
        """Verify, commit, find the next window."""

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""


class StepDecoder(Decoder):
    """Decodes one request; `source` finds its windows."""

    def __init__(self, request: Request, target: TargetLink, source: WindowSource, name: str) -> None:
        self.request, self.target, self.source, self.name = request, target, source, name

    def start(self) -> InFlight:
        """Prefill everything but the last prompt token, which is the first head token."""
        window = self.source.start(self._read_prompt)
        return InFlight(self.request.num_tokens - 1, window)

    def step(self, inflight: InFlight) -> Outcome:
        """Verify the window in flight, commit what the target says, find the next window."""
        request, ledger, source = self.request, self.request.ledger, self.source
        started, queued_s = ledger.now(), ledger.queued_s
        beside = source.begin(inflight)
        method = source.name
        on_start, on_exit = (beside.start, beside.hear if beside.is_listening else None) if beside else (None, None)
        ticket = self.target.submit(request, *inflight, on_start=on_start, on_exit=on_exit)
        request.chooser.look_ahead(inflight.window)
        request.chooser.draw_ahead(inflight.head + 1, len(inflight.window) + 1, self.target.vocab_size, ticket.done)
        acceptance = self._accept(inflight, self.target.result(request, ticket))
        request.in_company_of(ticket.num_beside)
        if beside is not None:
            beside.end(acceptance)
        tokens = self._commit(inflight, acceptance)
        ledger.queued_s += ticket.queued_s
        drafted_s = ledger.drafted_s
        window, next_source, siblings = source.next(inflight, acceptance)
        if ticket.queued_s:  # the next pass would have to queue, too, so that drafting its window costs nothing
            ledger.queued_s += ledger.drafted_s - drafted_s
        ended, num_right, num_aside = ledger.now(), acceptance.num_right, len(acceptance.aside)
        own_seconds = ended - started - (ledger.queued_s - queued_s)
        of_siblings = len(inflight.siblings.tokens), num_aside
        step = StepRecord(
            started, ended, len(inflight.window), num_right, next_source, method, own_seconds, *of_siblings
        )
        request.record(step)
        source.observe(step)
        following = InFlight(inflight.head + len(tokens), window, siblings, num_aside)
        return Outcome(tokens, num_right, following, method)

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""
        self.source.close()

    def _read_prompt(self, reader: RowReader | None = None) -> None:
        """Let the target read the prompt; from here on time counts as decoding, the first drafting included."""
        self.target.prefill(self.request, reader)
        if not self.request.steps:  # reading again in the middle of a text is part of decoding it
            self.request.ledger.prefilled = self.request.ledger.now()

    def _accept(self, inflight: InFlight, output: TargetOutput) -> Acceptance:
        """Compare the window with the target's choices, row by row."""
        choose = self._choice(inflight, output.after(inflight.num_again))
        if len(inflight.siblings.tokens):
            return accept_tree(inflight.window, inflight.siblings, choose)
        path = inflight.window.tolist()
        return accept_window(inflight.window, lambda row: choose(row, path[:row]))

    def _choice(self, inflight: InFlight, output: TargetOutput) -> ChooseRow:
        """How the target's choice behind a row is found, given the guesses that lead there."""
        request, first = self.request, inflight.head + 1
        if not request.chooser.needs_logits:
            ids, gaps = output.argmax_ids.tolist(), output.argmax_gap.tolist()
            return lambda row, path: graph_choice(ids[row], gaps[row], first + len(path))
        if output.short_rows is not None:
            short = output.short_rows
            return lambda row, path: request.chooser.choose_of(short[row], first + len(path))
        logits = output.logits
        assert logits is not None
        return lambda row, path: request.chooser.choose(logits[row], first + len(path), request.text_with(path))

    def _commit(self, inflight: InFlight, acceptance: Acceptance) -> list[int]:
        tokens = [*inflight.window[: acceptance.num_accepted].tolist(), *acceptance.rest]
        self.request.commit(tokens, acceptance.gaps, self.target.near_tie_gap)
        self.target.keep(self.request, inflight.head + acceptance.num_accepted + 1)
        return tokens


class FreeRows(WindowSource):
    """Plain decoding: no window, but what fits into the rows that the target computes anyway (`row_group`).

    In company others' rows fill a group up.
    """

    name = "plain"

    def __init__(self, request: Request, row_group: int = 1) -> None:
        self._request, self._row_group = request, row_group

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self.guess()

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What free rows hold."""
        return Found(self.guess())

    def guess(self) -> NDArray[np.int64]:
        """How the text went on before, as far as rows are free."""
        most = 0 if self._request.num_beside else self._row_group - 1
        repeats, count = self._request.repeats, min(most, self._request.window_limit())
        return repeats.window(count) if repeats is not None and count > 0 else NO_TOKENS


def with_siblings(found: Found, known: Known | None, siblings: SiblingChooser | None, request: Request) -> Found:
    """A window that was cut from what is `known`, with siblings, where that pays."""
    if siblings is None or known is None:
        return found
    room = request.max_tokens - request.num_tokens - len(found.window)
    return found._replace(siblings=siblings.choose(found.window, known, request.num_tokens, room))


def learn(step: StepRecord, windows: WindowLength | None, siblings: SiblingChooser | None) -> None:
    """Have what chose a step's guesses learn from it."""
    if windows is not None:
        windows.observe(step.num_window, step.num_accepted - step.num_aside, step.own_seconds, step.num_aside)
    if siblings is not None and step.num_siblings:
        siblings.observe(was_right=step.num_aside > 0)


_Resolved = tuple[NDArray[np.int64], str, BranchWindow | None]
"""A window, where it is from, and what it was cut from."""


class SerialSource(WindowSource):
    """Asks the draft for every window, and waits: both devices take turns. The ablation of what overlapping brings."""

    name = "serial"

    def __init__(self, request: Request, draft: DraftLink, passes: int, siblings: SiblingChooser | None = None) -> None:
        """Ask for windows of so many `passes` at most; where there are `siblings`, some stand beside each."""
        self.request, self.draft, self.passes, self._siblings = request, draft, passes, siblings

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

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """Ask the draft and wait for its answer; plain decoding until it is ready."""
        order, forced = self.order, self.forced(inflight, acceptance)
        if forced is not None:
            return forced
        if not order.limit or not (self.draft.has_text or self.draft.is_ready()):
            return Found()
        if not self.draft.has_text:
            return Found(self.draft_window(), "fresh")
        job = partial(self._resolve, inflight.head, acceptance, order)
        nothing: _Resolved = (NO_TOKENS, "none", None)
        window, source, known = self.draft.ask(job, nothing)
        return self.with_siblings(self.allowed(Found(window, source)), known)

    def _resolve(self, head: int, acceptance: Acceptance, order: WindowOrder) -> _Resolved:
        """Runs on the draft's thread."""
        drafter, (token, *behind) = self.draft.drafter, acceptance.rest
        window, source = drafter.resolve(head, acceptance.num_accepted, token, order, behind)
        return window, source, drafter.found

    def with_siblings(self, found: Found, known: BranchWindow | None) -> Found:
        """As the function of that name, for the draft's windows."""
        thoughts = known and Known(known.shares, known.num_main, known.candidate_ids, known.candidate_logprobs)
        return with_siblings(found, thoughts, self._siblings, self.request)

    def forced(self, inflight: InFlight, acceptance: Acceptance) -> Found | None:
        """What a constrained text must say next, where that is enough for a window."""
        constraint = self.request.chooser.mask
        if constraint is None or not (self.draft.has_text and self.draft.is_working()):
            return None
        forced = constraint.forced(self.request.window_limit())
        if len(forced) < FEWEST_FORCED:
            return None
        self.adopt(inflight, acceptance, forced)
        return Found(forced, "forced")

    def allowed(self, found: Found) -> Found:
        """What of a window a constrained text may say; the draft forgets the rest."""
        request, constraint = self.request, self.request.chooser.mask
        if constraint is None or not self.draft.is_working():
            return found
        window = found.window[: constraint.num_allowed(found.window)]
        self.draft.hold(partial(self.draft.drafter.chain.cut, request.num_tokens + len(window)))
        return found._replace(window=window)

    def begin_with(self, window: NDArray[np.int64]) -> None:
        """Tell the draft, some time before it is asked, that `window` goes on after the prompt that it was given."""
        self.draft.hold(partial(self._append, window))

    def _append(self, window: NDArray[np.int64]) -> None:
        """Runs on the draft's thread: the chain is made where the prompt is read."""
        self.draft.drafter.chain.append(window)

    def adopt(self, inflight: InFlight, acceptance: Acceptance, window: NDArray[np.int64]) -> None:
        """Tell the draft, some time before it is asked again, that `window` goes on after `inflight`."""
        num_accepted, (token, *behind) = acceptance.num_accepted, acceptance.rest
        self.draft.hold(partial(self.draft.drafter.adopt, inflight.head, num_accepted, token, window, behind))

    def observe(self, step: StepRecord) -> None:
        """The lengths of windows learn from it."""
        learn(step, self.request.windows, self._siblings)

    def draft_window(self) -> NDArray[np.int64]:
        """Bring the draft up to the committed text, after steps without it, and draft a window."""
        self.post_prefill()
        return self.fresh_window()

    def post_prefill(self) -> None:
        """Let the draft read the text now, beside the target; where they take turns, before its next window."""
        request = self.request
        of_request = (request.chooser, request.ledger, request.repeats)
        job = partial(self.draft.drafter.prefill, request.tokens.copy(), *of_request)
        (self.draft.hold if self.draft.takes_turns else self.draft.release)(job)
        self.draft.has_text = True

    def is_prepared(self, acceptance: Acceptance) -> bool:
        """Whether the next window is there already: never."""
        return False

    def fresh_window(self) -> NDArray[np.int64]:
        """A window after the text that the draft knows."""
        order = self.order
        return self.draft.ask(partial(self.draft.drafter.fresh, order), NO_TOKENS) if order.limit else NO_TOKENS
