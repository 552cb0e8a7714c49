"""One thread per device. The only file with threads and queues."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.pinning import pin_current_thread, pinned

Result = TypeVar("Result")
_MAX_PENDING = 32


class Ticket(Generic[Result]):
    """What a submitted job gives: its result or its error, once it is done.

    A step hands over between threads several times, so this is one lock where a `concurrent.futures.Future` is a
    condition, its lock and a list of waiters: half the time from the end of a job until its waiter runs.

    Attributes:
        error: what the job raised.
        queued_s: seconds that the job stood behind another owner's; 0 if it did not.
    """

    __slots__ = ("_is_done", "_result", "_wake", "error", "queued_s")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.queued_s = 0.0
        self._result: Result | None = None
        self._is_done = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def finish(self, result: Result | None, error: BaseException | None = None) -> None:
        """Give the result, or the error, to whoever waits; once."""
        self._result, self.error = result, error
        self._is_done = True
        self._wake.release()

    def done(self) -> bool:
        """Whether the job is over."""
        return self._is_done

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Wait until the job is over, by default as long as it takes; False if it is not within `timeout_s`."""
        if not self._is_done and self._wake.acquire(timeout=timeout_s):
            self._wake.release()
        return self._is_done

    def result(self) -> Result:
        """Wait for the job; its result, or its error raised here."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast(Result, self._result)


class _Entry(NamedTuple):
    """A job in the queue; `queued_at` (seconds of `perf_counter`) if another owner's job is before it."""

    job: Callable[[], Any]
    ticket: Ticket[Any]
    owner: object
    queued_at: float | None


class DeviceWorker:
    """Runs jobs of one device one after another, in the order given, on one (pinned) thread.

    The thread is a daemon: a device call that never returns cannot keep the program alive. Where `is_lent`, a free
    device also works on the thread of whoever waits for it (`perform`).
    """

    def __init__(self, name: str, cores: Sequence[int] = (), *, is_lent: bool = False) -> None:
        self.name = name
        self._cores, self._is_lent = tuple(cores), is_lent
        self._device = threading.Lock()
        self._jobs: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._num_pending = 0
        self._pending_by_owner: Counter[object] = Counter()
        self._count_lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"mirrorsd-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result], owner: object = None) -> Ticket[Result]:
        """Queue a job; its result or exception arrives in the ticket, and how long it stood behind another owner's.

        Raises:
            DeviceError: the worker is closed, or so far behind that its queue is full.
        """
        with self._count_lock:
            self._check_room()
            is_behind = self.serves_others(owner)
            self._count_up(owner)
        ticket: Ticket[Result] = Ticket()
        self._jobs.put(_Entry(job, ticket, owner, perf_counter() if is_behind else None))
        return ticket

    def perform(self, job: Callable[[], Result], owner: object = None) -> Ticket[Result]:
        """As `submit`, for a caller that would only wait: a free device that is lent does the job on its thread.

        That saves waking two threads, 0.1-0.2 ms. The ticket is done then.

        Raises:
            DeviceError: as `submit`.
        """
        with self._count_lock:
            self._check_room()
            is_free = self._is_lent and not self._num_pending
            if is_free:
                self._count_up(owner)
        if not is_free:
            return self.submit(job, owner)
        with self._device, pinned(self._cores):
            return self._do(_Entry(job, Ticket(), owner, None))

    def run(self, job: Callable[[], Result]) -> Result:
        """Submit a job and wait for it."""
        return self.submit(job).result()

    def has_pending(self) -> bool:
        """Whether a job is waiting or running."""
        return self._num_pending > 0

    def has_waiting(self) -> bool:
        """Whether another job waits behind the running one."""
        return not self._jobs.empty()

    def serves_others(self, owner: object) -> bool:
        """Whether a job of another owner is waiting or running."""
        return self._num_pending > self._pending_by_owner[owner]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let queued jobs finish and end the thread; False if it did not end in time (it is hung)."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive() or not self._device.acquire(timeout=timeout_s):
            return False
        self._device.release()
        return True

    def _work(self) -> None:
        pin_current_thread(self._cores)
        while (entry := self._jobs.get()) is not None:
            with self._device:
                self._do(entry)
            del entry

    def _do(self, entry: _Entry) -> Ticket[Any]:
        ticket = entry.ticket
        if entry.queued_at is not None:
            ticket.queued_s = perf_counter() - entry.queued_at
        try:
            result = entry.job()
        except BaseException as error:  # handed to whoever waits, on its own thread
            self._count_down(entry.owner)
            ticket.finish(None, error)
        else:
            self._count_down(entry.owner)
            ticket.finish(result)
        return ticket

    def _check_room(self) -> None:
        if self._is_closed:
            raise DeviceError(f"The {self.name} worker is closed.")
        if self._num_pending >= _MAX_PENDING:
            raise DeviceError(f"The {self.name} worker has {_MAX_PENDING} jobs waiting: the device has stalled.")

    def _count_up(self, owner: object) -> None:
        self._num_pending += 1
        self._pending_by_owner[owner] += 1

    def _count_down(self, owner: object) -> None:
        with self._count_lock:
            self._num_pending -= 1
            self._pending_by_owner[owner] -= 1
            if not self._pending_by_owner[owner]:
                del self._pending_by_owner[owner]
