"""One thread per device, on cores of its own: jobs in order, tickets for results, nobody who waits without an end."""

import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

from mirrorsd.graphs.errors import DeviceError, GenerationError
from mirrorsd.runtime.devices.company import RUN_S, Company, Entry, Worker
from mirrorsd.runtime.ledger import Overdue, TargetOutput, TargetPass, Ticket
from mirrorsd.runtime.turns import LOOK_S

Result = TypeVar("Result")
_MAX_PENDING = 32
"""Most jobs of one owner that wait: more of them mean that the device has stalled, however many owners there are."""
WATCH_S = 1.0
"""Between two looks at a device: 0.06 ms a second. 0.05: 1.06. 5: 0.01 (`bench/claims/process/first_times.py`)."""


@dataclass(slots=True)
class _Loan:
    """Who does the device's work on a thread of its own, since when, and what is done about work that is late."""

    thread: int
    owner: object
    overdue: Overdue | None
    started: float | None = None
    is_hung: bool = False  # nobody waits for its end any more


class _Jobs:
    """What a device is still to do: a queue, before it a backlog, and how many jobs of each owner are not over.

    A thread may take the lock twice: a finaliser may leave a job wherever Python happens to run it.
    """

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self.backlog: deque[Entry | None] = deque()
        self.num_pending, self.is_closed = 0, False
        self.by_owner: Counter[object] = Counter()
        self.lock: Any = threading.RLock()
        self._has_room = threading.Condition(self.lock)
        self._num_without_room = 0

    def put(self, entry: Entry) -> None:
        """Queue a job; under the lock."""
        self.count(entry.owner, 1)
        self.queue.put(entry)

    def count(self, owner: object, change: int) -> None:
        """So many more jobs of an owner wait or run."""
        with self.lock:
            self.num_pending += change
            self.by_owner[owner] += change
            if not self.by_owner[owner]:
                del self.by_owner[owner]
            if self._num_without_room:
                self._has_room.notify_all()

    def wait_for_room(self, owner: object, deadline_s: float) -> bool:
        """Wait while the owner has `_MAX_PENDING` jobs there; False if that takes too long. Under the lock."""
        self._num_without_room += 1
        try:
            until = perf_counter() + deadline_s
            while self.by_owner[owner] >= _MAX_PENDING and not self.is_closed:
                if not self._has_room.wait(until - perf_counter()):
                    return False
            return True
        finally:
            self._num_without_room -= 1

    def close(self) -> None:
        """Take none any more: who waits for room is told."""
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.queue.put(None)
                self._has_room.notify_all()


class DeviceWorker(Worker):
    """Runs jobs of one device one after another, in the order given, on one (pinned) thread.

    The thread is a daemon: a device call that never returns cannot keep the program alive. Where `is_lent`, a free
    device also works on the thread of whoever waits for it (`perform`). An owner whose jobs the device does not get
    done waits for room; others do not. A forked child touches nothing.

    Attributes:
        cores: those that its thread stays on; any where there are none.
        turn: held while the device is at work.
        loan: whose thread it is lent to, which has the turn or is about to.
        doing: does the next job, once several draft at once; None where jobs are done one by one.
        company: who shares passes that wait; None where each owner's are run by themselves.
        on_company: called, from any thread, when passes of more owners wait than can be run together.
    """

    doing: "Callable[[Entry], None] | None" = None

    def __init__(self, name: str, cores: Sequence[int] = (), *, is_lent: bool = False) -> None:
        self.name, self.cores, self._is_lent = name, tuple(cores), is_lent
        self.turn, self.jobs = threading.Lock(), _Jobs()
        self._job_started: float | None = None
        self._last_ended = 0.0
        self.loan: _Loan | None = None
        self.company: Company | None = None
        self.on_company: Callable[[], None] | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name=f"mirrorsd-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = RUN_S) -> Ticket[Result]:
        """Queue a job; its result or exception arrives in the ticket, and how long it stood behind another owner's.

        Raises:
            DeviceError: the worker is closed, or did not get one of these jobs done within `deadline_s`.
            GenerationError: the device is lent to this very thread, which a signal handler has interrupted.
        """
        self.check_reachable(is_waiting=False)
        ticket: Ticket[Result] = Ticket()
        with self.jobs.lock:
            if self.jobs.by_owner[owner] >= _MAX_PENDING and not self.jobs.wait_for_room(owner, deadline_s):
                words = f"has had {_MAX_PENDING} jobs of one text waiting for {deadline_s:g} s: the device has stalled."
                raise DeviceError(f"The {self.name} worker {words}")
            self._check_open()
            others = [one for one in self._owners() if one is not owner]
            self._arrives(job, owner)
            self.jobs.put(Entry(job, ticket, owner, perf_counter() if others else None))
        if self.company is None and any(one is not None for one in others):
            self._ask_for_company(job)
        return ticket

    def perform(
        self, job: Callable[[], Result], owner: object = None, overdue: Overdue | None = None
    ) -> Ticket[Result]:
        """As `submit`, for a caller that would only wait: a free device that is lent does the job on its thread.

        That saves waking two threads, 0.1-0.2 ms. `overdue` says when it is late, and ends it. Raises as `submit`.
        """
        self.check_reachable()
        ticket: Ticket[Result] = Ticket()
        loan = _Loan(get_ident(), owner, overdue)
        try:
            try:
                with self.jobs.lock:
                    self._check_open()
                    is_awaited = self.company is not None and self.company.seconds_to_wait((owner,)) > 0
                    is_busy = self.has_pending() or self.turn.locked() or is_awaited
                    if self._is_lent and not is_busy:
                        self.loan = loan
                        self._arrives(job, owner)
                if self.loan is not loan:
                    return self.submit(job, owner)
                with self.turn, pinned(self.cores):
                    loan.started = perf_counter()
                    self.do(Entry(job, ticket, owner, None))
            finally:
                self._give_back(loan)
        finally:  # an interrupt may have come in between
            self._give_back(loan)
        return ticket

    def staying(self) -> AbstractContextManager[None]:
        """Keep the calling thread, for a whole text, where jobs are lent to it: there and back takes 40 us a job."""
        return pinned(self.cores if self._is_lent else ())

    def _give_back(self, loan: _Loan) -> None:
        if self.loan is loan:
            self._job_started = self.loan = None

    def leave(self, job: Callable[[], object], owner: object = None) -> None:
        """Queue a job that nobody waits for, from wherever Python runs a finaliser; a closed worker takes none."""
        if not self.is_forked:
            with self.jobs.lock:
                if not self.jobs.is_closed:
                    self.jobs.put(Entry(job, Ticket(), owner, None))

    def run(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = RUN_S) -> Result:
        """Submit a job and wait for it.

        Raises:
            DeviceError: as `submit`, or some job ran longer than `deadline_s`.
        """
        self.check_reachable()
        ticket = self.submit(job, owner)
        if not self.wait(ticket, deadline_s):
            raise DeviceError(f"The {self.name}'s device has not answered for {deadline_s:g} s.")
        return ticket.result()

    def wait(self, ticket: Ticket[Any], deadline_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a job; False once `is_over`, or when the job that is running takes longer than `deadline_s`.

        Time behind others' jobs does not count while each ends in time. Late by a stop of the process gets a moment.
        """
        while not ticket.wait(LOOK_S):
            late = self._job_started if self.running_seconds() > deadline_s else None
            if is_over() or (late is not None and not ticket.wait(WATCH_S) and self._job_started == late):
                return ticket.done()
        return True

    def running_seconds(self) -> float:
        """For how long the job that the device is at has been running; 0 where it has none."""
        started = self._job_started
        return 0.0 if started is None else perf_counter() - started

    def idle_seconds(self) -> float:
        """For how long the device has had nothing to do."""
        return 0.0 if self.has_pending() else perf_counter() - self._last_ended

    def has_pending(self) -> bool:
        """Whether a job is waiting or running."""
        return self.jobs.num_pending > 0 or self.loan is not None

    def has_waiting(self) -> bool:
        """Whether another job waits behind the running one."""
        return bool(self.jobs.backlog) or not self.jobs.queue.empty()

    def serves(self, owner: object) -> bool:
        """Whether a job of this owner is waiting or running."""
        return owner in self._owners()

    def serves_others(self, owner: object) -> bool:
        """Whether a job of another owner is waiting or running."""
        return any(one is not owner for one in self._owners())

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let queued jobs finish and end the thread; False if it did not end in time (it is hung).

        There is nothing to wait for in a forked child, nor for a signal handler that interrupted a job on its thread.
        """
        if self.is_forked:
            return True
        self.end()
        if not (self._is_lent_here or self.jobs.lock._is_owned()):
            self._thread.join(timeout_s)
            if not self._thread.is_alive() and self.turn.acquire(timeout=timeout_s):
                self.turn.release()
                return True
        return False

    def end(self) -> None:
        """Take no more jobs; the thread ends by itself after those it has."""
        if not self.is_forked:
            self.jobs.close()

    def _work(self) -> None:
        pin_current_thread(self.cores)
        while (entry := self._next_entry()) is not None:
            (self.doing or self._do_next)(entry)
            del entry

    def _do_next(self, entry: Entry) -> None:
        entries, late = self.with_others(entry), None
        while not (turn := self.turn).acquire(timeout=WATCH_S):  # it may be another one once this one hangs
            late = self.end_overdue(late)
        try:
            self.do_together(entries)
        finally:
            turn.release()

    def _next_entry(self) -> Entry | None:
        """The next job; meanwhile, an eye on one that runs on the thread it was lent to."""
        if self.jobs.backlog:
            return self.jobs.backlog.popleft()
        late: float | None = None
        while True:
            try:
                return self.jobs.queue.get(timeout=WATCH_S if self._is_lent else None)
            except queue.Empty:
                late = self.end_overdue(late)

    def end_overdue(self, seen: float | None) -> float | None:
        """End the job on the thread it was lent to if it is overdue, as it was when it was `seen`; when it began."""
        loan = self.loan
        overdue, started = (loan.overdue, loan.started) if loan is not None else (None, None)
        if overdue is None or started is None or perf_counter() - started <= overdue.deadline_s:
            return None
        if started == seen:
            overdue.terminate()
        return started

    def with_others(self, entry: Entry) -> list[Entry]:
        """The job, and passes that can be run together with it, of those that wait and those that are about to."""
        company = self.company
        if company is None or not entry.may_join:
            return [entry]
        entries = company.gather(entry, self.jobs.backlog, self.jobs.queue)
        if any(one is not None and one.may_join for one in self.jobs.backlog):
            self._ask_for_company(entry.job)
        return entries

    def do_together(self, entries: Sequence[Entry]) -> None:
        """Run jobs in one pass, or each by itself where there is one, or where the device could not."""
        company = self.company
        results: list[TargetOutput | None] | None = None
        failure: BaseException | None = None
        if company is not None and len(entries) > 1:
            self._job_started = perf_counter()
            results, failure = company.attempt(entries)
            self._job_started, self._last_ended = None, perf_counter()
            if results is None:  # nobody's passes are run together any more
                self.company = self.on_company = None
        for number, entry in enumerate(entries):
            if results is None:
                self.do(entry, then=self.jobs.count)
            else:
                self.jobs.count(entry.owner, -1)
                entry.ticket.finish(results[number], failure)

    def _arrives(self, job: object, owner: object) -> None:
        if self.company is not None and isinstance(job, TargetPass):
            self.company.arrives(owner)

    def _ask_for_company(self, job: object) -> None:
        if self.on_company is not None and isinstance(job, TargetPass):
            self.on_company()

    def chunk_rows(self, owner: object, start: int, most: int) -> int:
        """How many rows of a prompt, behind `start` and at most `most`, shall pass at once: few beside texts."""
        company = self.company
        return most if company is None else company.rows_of_prompt(owner, self._owners(), start, most)

    def _owners(self) -> list[object]:
        """Whose jobs wait or run; None's are no text's."""
        return [*self.jobs.by_owner, *(loan.owner for loan in (self.loan,) if loan is not None)]

    def do(self, entry: Entry, then: Callable[[object, int], None] | None = None) -> None:
        """Run a job; `then` counts it as over before its ticket says so."""
        if entry.queued_at is not None:
            entry.ticket.queued_s = perf_counter() - entry.queued_at
        result, failure = None, None
        self._job_started = started = perf_counter()
        try:
            result = entry.job()
        except BaseException as error:  # handed to whoever waits, on its own thread
            failure = error
        self._job_started, self._last_ended = None, perf_counter()
        if self.company is not None and isinstance(entry.job, TargetPass):
            self.company.ended_alone(entry, self._last_ended - started)
        if then is not None:
            then(entry.owner, -1)
        entry.ticket.finish(result, failure)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that its thread is in."""
        return os.getpid() != self._process

    @property
    def _is_lent_here(self) -> bool:
        return getattr(self.loan, "thread", None) == get_ident()

    def check_reachable(self, *, is_waiting: bool = True) -> None:
        """Refuse a job that the device could never begin while this thread waits for it.

        Raises:
            DeviceError: the device's thread stayed behind when this process was forked.
            GenerationError: this thread does or gives the device a job, which a signal handler has interrupted.
        """
        if self.is_forked:
            raise DeviceError(f"The {self.name} worker is in the process that this one was forked from.")
        if self._is_lent_here or (is_waiting and self.jobs.lock._is_owned()):  # its thread could end no job
            raise GenerationError(
                f"The {self.name} is in the middle of a pass on this very thread: a signal handler can have no other "
                "there. Note the signal, and generate once the interrupted call has returned, or on another thread."
            )

    def _check_open(self) -> None:
        if self.jobs.is_closed:
            raise DeviceError(f"The {self.name} worker is closed.")


def pin_current_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread, and the threads it starts, on these cores (Linux; elsewhere the system decides).

    Cores that this process may not use are left out; if none is left the thread stays where it is.
    """
    if cores and hasattr(os, "sched_setaffinity") and (usable := {*cores} & os.sched_getaffinity(0)):
        os.sched_setaffinity(0, usable)


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling thread on these cores within the block; one that is on no others stays as it is (45 us)."""
    usual = os.sched_getaffinity(0) if cores and hasattr(os, "sched_setaffinity") else set[int]()
    if usual.issubset(cores):
        yield
        return
    try:
        pin_current_thread(cores)
        yield
    finally:
        os.sched_setaffinity(0, usual)
