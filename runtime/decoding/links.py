"""The scheduler's lines to both devices' workers, for one request.

To the target: chunked prefill, passes over windows, the record of what is cached. To the draft, which costs speed when
it fails, never a token: whatever it does wrong is one warning, after which decoding goes on plainly.
"""

import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import HeadGuesses, Kept, TargetSession
from mirrorsd.runtime.decoding.protocol import RowReader
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.devices.company import Worker
from mirrorsd.runtime.devices.draft_company import AskedJob, DraftJob
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.draft.tree import longest_common_prefix
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, Overdue, TargetOutput, TargetPass, Ticket
from mirrorsd.runtime.policy.siblings import NO_SIBLINGS, Siblings, pass_parents

Result = TypeVar("Result")
_TERMINATE_S = 2.0
"""Seconds that a device has to end a pass when it is asked to."""


class TargetLink:
    """Runs the target for one request at a time; its cache survives from request to request.

    Attributes:
        reading: the tokens that will be cached once the prompt is read that is being read; none where none is.
    """

    def __init__(self, session: TargetSession, worker: Worker) -> None:
        self.context = session.context
        self.vocab_size = session.vocab_size
        self.near_tie_gap, self.row_group = session.near_tie_gap, session.row_group
        self.takes_trees, self.heads = session.takes_trees, session.heads
        self._session, self._worker = session, worker
        self._cached = np.zeros(session.context, dtype=np.int64)
        self._num_cached, self._whose = 0, 0  # a handler's text may come in the middle of another one's step
        self.reading = self._cached[:0]

    def prefill(self, request: Request, reader: RowReader | None = None) -> None:
        """Feed all tokens but the last, in chunks, after the longest common prefix with what is cached already.

        What is cached and `reader` has not read is fed again; so is what is cached behind the last place where the
        target can go on.
        """
        tokens = request.tokens[:-1]
        start = longest_common_prefix(self.cached, tokens)
        if reader is not None:
            start = min(start, reader.num_read(request.tokens))
        start = self._session.resumable(start)
        request.num_reused = start
        # Before the first row is written over: an interrupted chunk leaves anything behind.
        self._num_cached, self._whose, self.reading = start, id(request), tokens
        try:
            self._read(request, start, reader)
        finally:
            self.reading = tokens[:0]

    def _read(self, request: Request, start: int, reader: RowReader | None) -> None:
        tokens = self.reading
        while start < len(tokens) and self._whose == id(request):  # else its next step reads it again
            request.raise_if_cancelled()
            most = self._worker.chunk_rows(request.ledger, start, request.speculation.prefill_rows)
            chunk = tokens[start : (stop := min(start + most, len(tokens)))]
            job = TargetPass(session=self._session, tokens=chunk, start=start, ledger=request.ledger)
            self.result(request, ticket := self._worker.submit(job, request.ledger))
            request.in_company_of(ticket.joint)
            self._remember(start, chunk, id(request))
            if reader is not None:
                reader.read(start, stop)
            start = stop

    def num_cached(self, request: Request, most: int | None = None) -> int:
        """How many leading tokens of its text, at most `most`, need not be fed again for the target's sake."""
        found = longest_common_prefix(self.cached, request.tokens[:-1])
        return self._session.resumable(found if most is None else min(found, most))

    def guess(
        self,
        request: Request,
        kind: str,
        start: int,
        tokens: NDArray[np.int64],
        noise: NDArray[np.float32] | None,
        rows: NDArray[np.int64] | None,
    ) -> HeadGuesses:
        """Run a head over rows of the last pass, and wait: see `TargetSession.guess`.

        Raises:
            Cancelled: the request was cancelled meanwhile.
            DeviceError: as `result`.
        """
        job = partial(self._session.guess, kind, tokens, start, noise=noise, rows=rows, ledger=request.ledger)
        overdue = Overdue(request.speculation.target_deadline_s, self._session.terminate)
        ticket = self._worker.perform(job, request.ledger, overdue)
        found = self.result(request, ticket)
        request.ledger.queued_s += ticket.queued_s
        return found

    def submit(
        self,
        request: Request,
        head: int,
        window: NDArray[np.int64],
        siblings: Siblings = NO_SIBLINGS,
        num_again: int = 0,
        on_start: Callable[[], None] | None = None,
        on_exit: Callable[[ExitGuesses], None] | None = None,
    ) -> Ticket[TargetOutput]:
        """Start a pass over the `num_again` tokens before the head token, it, the window, and its siblings.

        Rows are padded where equal row counts are asked for. Exits are heard of the head token's and the window's rows.
        Where the caller has nothing to do meanwhile, the pass may be over when this returns. `on_start` and `on_exit`
        run on the target's thread, just before its device starts and between its stages, which leave the interpreter
        to whom they woke.
        """
        start, stop = head - num_again, num_again + 1 + len(window)
        rows = np.concatenate([request.tokens[start : head + 1], window, siblings.tokens])
        self._num_cached = min(self._num_cached, start)
        padded = request.speculation.pad_rows_to
        if len(rows) < padded <= self.context - start:
            rows = np.concatenate([rows, np.zeros(padded - len(rows), dtype=np.int64)])
        job = TargetPass(
            session=self._session,
            tokens=rows,
            start=start,
            ledger=request.ledger,
            with_logits=request.chooser.filters or request.chooser.needs_logits,
            on_start=on_start,
            on_exit=on_exit
            if on_exit is None or len(rows) == 1 + len(window)
            else lambda guesses: on_exit(guesses.rows(num_again, stop)),
            exits=None if request.speculation.exits == "all" else request.speculation.exits,
            parents=pass_parents(num_again, stop, siblings) if len(siblings.tokens) else None,
        )
        if request.chooser.needs_logits and request.chooser.draws_ahead(self.vocab_size):
            return self._worker.submit(job, request.ledger)
        overdue = Overdue(request.speculation.target_deadline_s, self._session.terminate)
        return self._worker.perform(job, request.ledger, overdue)

    def result(self, request: Request, ticket: Ticket[Result]) -> Result:
        """Wait for a pass of this session.

        Raises:
            Cancelled: the request was cancelled meanwhile.
            DeviceError: the pass failed, or lasts longer than `target_deadline_s`.
        """
        deadline_s = request.speculation.target_deadline_s
        if not self._worker.wait(ticket, deadline_s, request.is_cancelled):
            self._session.terminate()
            if not ticket.wait(_TERMINATE_S):
                request.raise_if_cancelled()
                raise DeviceError(
                    f"The target's device has not answered for {deadline_s:g} s (target_deadline_s). Load the bundle "
                    "again; if its passes really take that long, give it more time."
                )
        if isinstance(ticket.error, Exception):  # an interrupt, or an exit, is the caller's own
            request.raise_if_cancelled()  # it ended early for that reason
        return ticket.result()

    @property
    def cached(self) -> NDArray[np.int64]:
        """The tokens whose rows are cached."""
        return self._cached[: self._num_cached]

    def read_cache(self, num_rows: int) -> Kept:
        """Copies of the first rows; see `TargetSession.read_cache`. Between two requests' steps only."""
        return self._worker.run(partial(self._session.read_cache, num_rows))

    def write_cache(self, tokens: NDArray[np.int64], kept: Kept) -> None:
        """Take over what was kept of a text; see `TargetSession.write_cache`. Between two requests' steps only."""
        self._num_cached, self._whose = 0, 0
        self._worker.run(partial(self._session.write_cache, kept))
        self._remember(0, tokens)

    def follow(self, other: "TargetLink", most: int | None = None) -> bool:
        """Take over what another conversation has cached, at most so many tokens; whether that can be done.

        What this one has cached, too, is not copied. Between two requests' steps of this one only.
        """
        if self._session.copies_rows:
            self._whose = 0
            self._worker.run(partial(self._copy, other, most))
        return self._session.copies_rows

    def _copy(self, other: "TargetLink", most: int | None) -> None:
        """Runs on the target's thread, where what the other one notes as cached stays so; nothing if too late."""
        tokens = other.cached[: 0 if self._whose else most].copy()
        start = self._num_cached = longest_common_prefix(self.cached, tokens)
        self._session.copy_rows(other._session, range(start, len(tokens)))
        self._remember(start, tokens[start:])

    def forget(self) -> None:
        """Take nothing of what is cached for read any more. Between two requests' steps only."""
        self._num_cached = 0

    def terminate(self) -> None:
        """Ask the device to end the pass that is running, from any thread; no pass, nothing happens."""
        self._session.terminate()

    def serves_others(self, request: Request) -> bool:
        """Whether the target is at work for another conversation, or will be first."""
        return self._worker.serves_others(request.ledger)

    def keep(self, request: Request, num_cached: int) -> None:
        """Note that the first `num_cached` positions of the committed text are cached."""
        self._remember(self._num_cached, request.tokens[self._num_cached : num_cached], id(request))

    def _remember(self, start: int, tokens: NDArray[np.int64], whose: int = 0) -> None:
        """Note what is cached behind `start`; nothing where other rows were written since this text's were read."""
        self._num_cached = min(self._num_cached, start)
        if whose == self._whose:
            self._cached[start : start + len(tokens)] = tokens
            self._num_cached = start + len(tokens)


class DraftLink:
    """Posts jobs to the draft worker for one request and watches over their outcome.

    Attributes:
        drafter: only ever touched by jobs on the draft worker.
        has_text: whether the draft has been given this text: before, it is decoded plainly.
        failure: why the draft was given up, or None while it works.
        takes_turns: whether draft and target compute on the same cores: side by side, each would slow the other.
    """

    def __init__(
        self,
        drafter: Drafter,
        worker: Worker,
        deadline_s: float,
        ledger: Ledger,
        *,
        takes_turns: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.drafter = drafter
        self.takes_turns = takes_turns
        self.failure: str | None = None
        self.has_text = False
        self._to_prepare: Callable[[], Ticket[None]] | None = None
        self._preparation: Ticket[None] | None = None
        self._worker = worker
        self._deadline_s = deadline_s
        self._ledger, self._is_cancelled = ledger, is_cancelled
        self._posted: list[Ticket[Any]] = []
        self._held: deque[Callable[[], object]] = deque()

    def prepare(self, num_slots: int, worker: Worker) -> None:
        """Let the draft's device get ready for a text of `num_slots` slots, on `worker`, which may compile for long.

        That begins once somebody asks whether it `is_ready`. Nobody waits for it: the text is decoded plainly.
        """
        session = self.drafter.session
        if not session.is_prepared(num_slots):
            self._to_prepare = partial(worker.submit, partial(session.prepare, num_slots), self._ledger)

    @property
    def is_preparing(self) -> bool:
        """Whether the draft's device is being got ready for this text."""
        return self._preparation is not None and not self._preparation.done()

    @property
    def round_seconds(self) -> float:
        """What the smallest round takes lately; 0 until it was measured. May be read from any thread."""
        return self.drafter.clock.shortest_seconds

    def num_unread(self, tokens: NDArray[np.int64]) -> int:
        """How many of a text's tokens the draft would have to read first; a guess while it is at work."""
        return self.drafter.chain.num_unread(tokens)

    def is_ready(self) -> bool:
        """Whether the draft can be used, and has all that this text needs, which is begun with the first question."""
        to_prepare, self._to_prepare = self._to_prepare, None
        if to_prepare is not None:
            try:
                self._preparation = to_prepare()
            except DeviceError as error:
                self._give_up(str(error))
        preparation = self._preparation
        if preparation is not None and preparation.done():
            self._has_failed(preparation)
            self._preparation = None
        return self._preparation is None and self.is_working()

    def post(self, job: Callable[[], object]) -> None:
        """Queue a job without waiting for it. May be called from any thread."""
        if self.failure is None:
            try:
                whole = DraftJob(job)
                whole.drafter = self.drafter
                self._posted.append(self._worker.submit(whole, self._ledger, deadline_s=self._deadline_s))
            except DeviceError as error:
                self._give_up(str(error))

    def hold(self, job: Callable[[], object]) -> None:
        """Keep a job that nobody waits for until `release` or the next `ask`.

        What the draft tidies up between two passes would otherwise take the interpreter from the scheduler, while the
        target has nothing to do.
        """
        if self.failure is None:
            self._held.append(job)

    def release(self, job: Callable[[], object] | None = None) -> None:
        """Post what was kept, and `job` after it, as one job."""
        whole = self._after_held(job or _nothing)
        if whole is not _nothing:
            self.post(whole)

    def is_busy(self) -> bool:
        """Whether the draft's device still has a job of this request."""
        return self._worker.serves(self._ledger)

    def has_waiting(self) -> bool:
        """Whether another job waits for the draft's device."""
        return self._worker.has_waiting()

    def ask(self, job: Callable[[], Result], default: Result) -> Result:
        """Run a job after those posted before, and wait; `default` if the draft fails or is already given up.

        The waiting time is booked as exposed draft time.
        """
        if not self.is_working():
            return default
        asked = self._ledger.now()
        with self._ledger.time("host", "exposed"):
            ticket = self._answered(self._after_held(job))
        if ticket is None or not self.is_working() or self._has_failed(ticket):
            return default
        self._ledger.queued_s += ticket.queued_s
        self._ledger.drafted_s += self._ledger.now() - asked - ticket.queued_s
        return ticket.result()

    def _answered(self, job: Callable[[], Result]) -> Ticket[Result] | None:
        """The ticket of a job that is over; None if the draft is given up, or nobody wants the answer any more."""
        try:
            whole = AskedJob(job)
            whole.drafter = self.drafter
            ticket = self._worker.submit(whole, self._ledger, deadline_s=self._deadline_s)
        except DeviceError as error:
            self._give_up(str(error))
            return None
        if self._worker.wait(ticket, self._deadline_s, self._is_cancelled):
            return ticket
        if not self._is_cancelled():
            self._give_up(f"it did not answer within {self._deadline_s:g} s")
        return None

    def is_working(self) -> bool:
        """Whether the draft can still be used; looks at the jobs that have ended since the last call."""
        while self._posted and self._posted[0].done():
            self._has_failed(self._posted.pop(0))
        return self.failure is None

    def _after_held(self, job: Callable[[], Result]) -> Callable[[], Result]:
        """`job`, with everything that was kept before it."""
        held: list[Callable[[], object]] = []
        with suppress(IndexError):  # empty; a length looked at first could be another thread's
            while True:
                held.append(self._held.popleft())
        return partial(_in_turn, held, job) if held else job

    def _has_failed(self, ticket: Ticket[Any]) -> bool:
        """Whether a job that is over has failed; then the draft is given up."""
        error = ticket.error
        if error is not None:
            self._give_up(f"{type(error).__name__}: {error}")
        return error is not None

    def _give_up(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            if self._is_cancelled():  # a device that is closed under the text
                return
            message = f"The draft failed ({reason}); the rest of this text is decoded plainly. The text is unaffected."
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _in_turn(first: list[Callable[[], object]], last: Callable[[], Result]) -> Result:
    for job in first:
        job()
    return last()


def _nothing() -> None:
    """What is posted where only what was kept is to run."""
