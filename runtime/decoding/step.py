"""One text's loop and its step, whatever the method: verify what is in flight, commit, find the next window.

What varies is where the next window comes from: an object behind `WindowSource`. Which tokens come out never depends on
it. The window in flight is the loop's only state besides the caches and the text. The plainest sources are here too:
no window, and draft, then verify. The others fall back on them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import Cancelled, ContinuationError
from mirrorsd.runtime.decoding.links import DraftLink, TargetLink
from mirrorsd.runtime.decoding.protocol import (
    Decoder,
    Found,
    GeneratedToken,
    InFlight,
    Outcome,
    ReadPrompt,
    RowReader,
    Stop,
    WindowSource,
    Written,
)
from mirrorsd.runtime.decoding.request import (
    Acceptance,
    ChooseRow,
    Request,
    StepRecord,
    accept_tree,
    accept_window,
    graph_choice,
)
from mirrorsd.runtime.draft.tree import NO_TOKENS, BranchWindow
from mirrorsd.runtime.ledger import TargetOutput
from mirrorsd.runtime.policy.siblings import Known, SiblingChooser
from mirrorsd.runtime.policy.windows import WindowLength, WindowOrder
from mirrorsd.texts.shown_text import Piece, StopWatch

FEWEST_FORCED = 2
"""Tokens that a form leaves no choice of, from which on they are a better window than the draft's own."""


class StepDecoder(Decoder):
    """Decodes one request; `source` finds its windows, until it names another one."""

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
        if request.chooser.needs_logits:  # else the target's graph chooses
            request.chooser.look_ahead(inflight.window)
            request.chooser.draw_ahead(inflight.head + 1, len(inflight.window) + 1, self.target.vocab_size, ticket.done)
        acceptance = self._accept(inflight, self.target.result(request, ticket))
        request.in_company_of(ticket.joint)
        if beside is not None:
            beside.end(acceptance)
        tokens = self._commit(inflight, acceptance)
        ledger.queued_s += ticket.queued_s
        drafted_s = ledger.drafted_s
        window, next_source, siblings, then = source.next(inflight, acceptance)
        if ticket.queued_s:  # the next pass would have to queue, too, so that drafting its window costs nothing
            ledger.queued_s += ledger.drafted_s - drafted_s
        ended, num_right, num_aside = ledger.now(), acceptance.num_right, len(acceptance.aside)
        own_seconds = ended - started - (ledger.queued_s - queued_s)
        of_siblings = len(inflight.siblings.tokens), num_aside
        step = StepRecord(
            started, ended, len(inflight.window), num_right, next_source, method, own_seconds, *of_siblings
        )
        request.record(step)
        if then is None:
            source.observe(step)
        else:
            self.source = then
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
        choose = self._choice(inflight, output.after(inflight.num_again) if inflight.num_again else output)
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
        self._request, self.row_group = request, row_group

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self.guess()

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What free rows hold."""
        return Found(self.guess())

    def guess(self) -> NDArray[np.int64]:
        """How the text went on before, as far as rows are free."""
        request, repeats = self._request, self._request.repeats
        if repeats is None or self.row_group == 1 or request.joint.num_beside:
            return NO_TOKENS
        return repeats.window(min(self.row_group - 1, request.window_limit()))


class Asleep(FreeRows):
    """Plain decoding until so many tokens are written; then `source` finds windows again."""

    def __init__(self, free: FreeRows, source: WindowSource, until: int, on_end: Callable[[int, int], None]) -> None:
        """At the end `on_end` hears how many were written, and how many were not, as the text has ended before."""
        super().__init__(free._request, free.row_group)
        self._source, self._until, self._slept, self._on_end = source, until, 0, on_end

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        self._slept += 1 + acceptance.num_right
        if self._slept < self._until:
            return Found(self.guess())
        self._on_end(self._slept, 0)
        return Found(self.guess(), then=self._source)

    def close(self) -> None:
        self._on_end(self._slept, self._until - self._slept)
        self._source.close()


def with_siblings(found: Found, known: Known | None, siblings: SiblingChooser | None, request: Request) -> Found:
    """A window that was cut from what is `known`, with siblings, where that pays."""
    if siblings is None or known is None:
        return found
    room = request.max_tokens - request.num_tokens - len(found.window)
    return found._replace(siblings=siblings.choose(found.window, known, request.num_tokens, room))


def remember(windows: WindowLength | None, siblings: SiblingChooser | None) -> None:
    """Have what chose the guesses of a pass remember what they promised: the next ones are chosen before it learns."""
    for chooser in [one for one in (windows, siblings) if one is not None]:
        chooser.begin()


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

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the pass: the devices take turns."""
        remember(self.request.windows, self._siblings)

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


def run_steps(decoder: Decoder, watch: StopWatch) -> Iterator[Written | Stop]:
    """Step until the text is over; yields what each step has written and one `Stop` at the end.

    Tokens that a step committed after the stopping token are dropped, and counted nowhere.
    """
    request = decoder.request
    token_ids: list[int] = []
    inflight: InFlight | None = None
    num_spans = 0
    while True:
        try:
            inflight = decoder.start() if inflight is None else inflight
            request.raise_if_cancelled()
            is_given = len(inflight.window) > 0
            outcome = decoder.step(inflight)
        except Cancelled:
            if not request.is_overdue():
                raise
            request.end_after(len(token_ids))
            last = watch.finish("deadline")
            yield Written(last.text, ())
            yield Stop(last.stop_reason or "deadline", token_ids)
            return
        inflight = outcome.inflight
        pieces: list[Piece] = []
        reason: str | None = None
        first = len(token_ids)
        for token in outcome.tokens:
            token_ids.append(token)
            pieces.append(watch.push(token))
            reason = pieces[-1].stop_reason
            if reason is not None:
                break
        if reason is None and request.num_tokens >= request.max_tokens:
            is_done = request.num_new >= request.config.max_new_tokens
            pieces.append(watch.finish("length" if is_done else "context"))
            reason = pieces[-1].stop_reason
        labelled = _label(outcome, token_ids[first:], request, first, is_given=is_given)
        tokens = _with_texts(labelled, pieces)
        if reason is not None:
            request.end_after(len(token_ids))
            _check_all_replayed(request, reason)
        spans = tuple(request.ledger.spans[num_spans:])
        num_spans += len(spans)
        yield Written("".join(piece.text for piece in pieces), tokens, spans=spans)
        if reason is not None:
            yield Stop(reason, token_ids)
            return


def _check_all_replayed(request: Request, reason: str) -> None:
    """Refuse to end before the ids that the text was to go on from."""
    if request.num_to_replay:
        place = request.num_new
        raise ContinuationError.of(place, f"{request.config.continue_from[place]} was given, it is over ({reason})")


def _label(
    outcome: Outcome, token_ids: list[int], request: Request, first: int, *, is_given: bool
) -> tuple[GeneratedToken, ...]:
    """Say of a step's tokens, the text's `first` and those after it, where they came from and how likely they were.

    Plain decoding that was given no window (`is_given`) and verified one has looked it up in the text; so has a step
    behind one that says so.
    """
    own = "plain" if outcome.method == "plain" else "correction"
    is_free = outcome.method == "plain" and not is_given
    is_looked_up = is_free or (len(request.steps) > 1 and request.steps[-2].next_source == "text")
    sources = ["lookup" if is_looked_up else "window"] * outcome.num_accepted + [own]
    places = count(request.num_prompt + first)
    logprobs = map(request.chooser.take_logprob, places) if request.config.logprobs else repeat(None)
    return tuple(
        GeneratedToken(token, source, logprob=logprob)
        for token, source, logprob in zip(token_ids, sources, logprobs, strict=False)
    )


def _with_texts(tokens: tuple[GeneratedToken, ...], pieces: list[Piece]) -> tuple[GeneratedToken, ...]:
    """Give each token what became certain with it; the last one also what was held back until the end."""
    last = len(tokens) - 1
    texts = [*(piece.text for piece in pieces[:last]), "".join(piece.text for piece in pieces[last:])]
    return tuple(
        token._replace(text=text, num_decoded=piece.num_decoded)
        for token, text, piece in zip(tokens, texts, pieces, strict=False)
    )
