"""Work on a thread that can be broken off: a chat template is a program, and may run for ever."""

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BrokenOff(BaseException):
    """Raised in the work that took too long. Nothing that catches errors of templates catches it."""


class Reading(Generic[Result]):
    """Work that another thread may break off, between two of its Python instructions."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: int | None = None

    def run(self) -> Result:
        """Do it.

        Raises:
            BrokenOff: it was broken off.
        """
        with self._lock:
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread = None

    def break_off(self) -> None:
        """End the work if it is being done."""
        with self._lock:
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(BrokenOff))
