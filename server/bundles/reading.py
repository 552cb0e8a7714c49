"""Work on a thread that can be broken off: a chat template is a program, and may run for ever."""

import ctypes
import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BrokenOff(BaseException):
    """Raised in the work that took too long. Nothing that catches errors of templates catches it."""


class Reading(Generic[Result]):
    """Work that another thread may break off, between two of its Python instructions.

    Args:
        work: What is done.
        limit_s: How long it may take, once it has begun.
    """

    def __init__(self, work: Callable[[], Result], limit_s: float) -> None:
        self._work, self._limit_s = work, limit_s
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began = 0.0

    def run(self) -> Result:
        """Do it.

        Raises:
            BrokenOff: it was broken off.
        """
        with self._lock:
            self._thread, self._began = threading.get_ident(), monotonic()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread = None

    def check(self) -> None:
        """Break the work off if it has taken too long.

        To be called again while it goes on: Python drops what is raised in a weak reference's callback or a destructor.
        """
        with self._lock:
            if self._thread is not None and monotonic() - self._began >= self._limit_s:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(BrokenOff))
