"""The scheduler's line to the draft worker. A draft that fails here costs speed, never a token.

Whatever the draft does wrong - raises, hangs past the deadline, returns what no draft returns - ends up as `failure`:
one sentence, warned about once, after which every window is empty and decoding goes on plainly.
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
from mirrorsd.runtime.backends.protocol import Ticket
from mirrorsd.runtime.devices.company import Worker
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.ledger import Ledger

Result = TypeVar("Result")


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
        self._preparation: Ticket[None] | None = None
        self._worker = worker
        self._deadline_s = deadline_s
        self._ledger, self._is_cancelled = ledger, is_cancelled
        self._posted: list[Ticket[Any]] = []
        self._held: deque[Callable[[], object]] = deque()

    def prepare(self, num_slots: int, worker: Worker) -> None:
        """Let the draft's device get ready for a text of `num_slots` slots, on `worker`, which may compile for long.

        Nobody waits for that: the text is decoded plainly until `is_ready`.
        """
        session = self.drafter.session
        if not session.is_prepared(num_slots):
            try:
                self._preparation = worker.submit(partial(session.prepare, num_slots), self._ledger)
            except DeviceError as error:
                self._give_up(str(error))

    @property
    def is_preparing(self) -> bool:
        """Whether the draft's device is being got ready for this text, as far as `is_ready` has seen."""
        return self._preparation is not None

    @property
    def round_seconds(self) -> float:
        """What the smallest round takes lately; 0 until it was measured. May be read from any thread."""
        return self.drafter.clock.shortest_seconds

    def num_unread(self, tokens: NDArray[np.int64]) -> int:
        """How many of a text's tokens the draft would have to read first; a guess while it is at work."""
        return self.drafter.chain.num_unread(tokens)

    def is_ready(self) -> bool:
        """Whether the draft can be used, and has all that this text needs."""
        preparation = self._preparation
        if preparation is not None and preparation.done():
            self._has_failed(preparation)
            self._preparation = None
        return self._preparation is None and self.is_working()

    def post(self, job: Callable[[], object]) -> None:
        """Queue a job without waiting for it. May be called from any thread."""
        if self.failure is None:
            try:
                self._posted.append(self._worker.submit(job, self._ledger, deadline_s=self._deadline_s))
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
            ticket = self._worker.submit(job, self._ledger, deadline_s=self._deadline_s)
        except DeviceError as error:
            self._give_up(str(error))
            return None
        if self._worker.wait(ticket, self._deadline_s, self._is_cancelled):
            return ticket
        if not self._is_cancelled():
            self._give_up(f"it did not answer within {self._deadline_s:g} s")
        return None

    def check_answer(self, asked: float) -> None:
        """Give the draft up if what was posted at `asked` (seconds of the ledger's clock) is not there in time."""
        if self._ledger.now() - asked > self._deadline_s and self._worker.running_seconds() > self._deadline_s:
            self._give_up(f"it did not answer within {self._deadline_s:g} s")

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
