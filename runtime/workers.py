"""One thread per device. The only file with threads and queues."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.pinning import pin_current_thread

Result = TypeVar("Result")
_MAX_PENDING = 32


class DeviceWorker:
    """Runs jobs of one device one after another, in the order given, on one (pinned) thread.

    The thread is a daemon: a device call that never returns cannot keep the program alive.
    """

    def __init__(self, name: str, cores: Sequence[int] = ()) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._num_pending = 0
        self._count_lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, args=(tuple(cores),), name=f"mirrorsd-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job; its result or exception arrives in the future.

        Raises:
            DeviceError: the worker is closed, or so far behind that its queue is full.
        """
        if self._is_closed:
            raise DeviceError(f"The {self.name} worker is closed.")
        with self._count_lock:
            if self._num_pending >= _MAX_PENDING:
                raise DeviceError(f"The {self.name} worker has {_MAX_PENDING} jobs waiting: the device has stalled.")
            self._num_pending += 1
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future

    def run(self, job: Callable[[], Result]) -> Result:
        """Submit a job and wait for it."""
        return self.submit(job).result()

    def has_pending(self) -> bool:
        """Whether a job is waiting or running."""
        return self._num_pending > 0

    def has_waiting(self) -> bool:
        """Whether another job waits behind the running one."""
        return not self._jobs.empty()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let queued jobs finish and end the thread; False if it did not end in time (it is hung)."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, cores: tuple[int, ...]) -> None:
        pin_current_thread(cores)
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                result = job()
            except BaseException as error:  # handed to whoever waits, on its own thread
                self._count_down()
                future.set_exception(error)
            else:
                self._count_down()
                future.set_result(result)
            del entry, job, future

    def _count_down(self) -> None:
        with self._count_lock:
            self._num_pending -= 1
