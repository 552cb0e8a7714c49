"""A device's jobs: what is queued, and what whoever queued it waits for."""

import threading
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mirrorsd.runtime.backends.protocol import TargetPass

Result = TypeVar("Result")


class Ticket(Generic[Result]):
    """What a submitted job gives: its result or its error, once it is done.

    A step hands over between threads several times, so this is one lock where a `concurrent.futures.Future` is a
    condition, its lock and a list of waiters: half the time from the end of a job until its waiter runs.

    Attributes:
        error: what the job raised.
        queued_s: seconds that the job stood behind another owner's; 0 if it did not.
        num_beside: how many other owners' passes were run together with this one.
    """

    __slots__ = ("_is_done", "_result", "_wake", "error", "num_beside", "queued_s")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.queued_s, self.num_beside = 0.0, 0
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


class Entry(NamedTuple):
    """A job in the queue; `queued_at` (seconds of `perf_counter`) if another owner's job is before it."""

    job: Any
    ticket: Ticket[Any]
    owner: object
    queued_at: float | None

    @property
    def may_join(self) -> bool:
        """Whether it is a pass that can be run with others'."""
        return isinstance(self.job, TargetPass) and self.job.may_join
