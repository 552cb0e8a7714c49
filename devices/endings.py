"""Ends of a process that its device threads do not see coming: an exit without `close`, and a fork.

A thread that computes in a vendor's C++ while the interpreter is taken down ends the whole process by `abort`. A forked
child has the vendors' objects without their threads, and their destructors wait for those threads for ever. So whatever
runs on devices is closed before the interpreter goes, and a child leaves what it inherited untouched.

Owns: the hooks of exit and fork, what they do to whatever was given to `watch`, and threads that may be begun when the
main one has ended. Does not own: how that is closed
(`engine`), nor what a forked child is told that uses it.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NoReturn, Protocol, TypeVar

Made = TypeVar("Made")

DEVICE_THREADS = "mirrorsd-"
"""How the names of threads begin that call into vendors."""
_WAIT_S = 30.0
"""Most seconds that an exit waits for calls under way: a compilation may take as long, and cannot be ended."""
_VENDORS = ("onnxruntime", "openvino")


class Watched(Protocol):
    """Something with threads on devices."""

    def close(self) -> None:
        """End them, within seconds."""

    def inherited(self) -> list[Any]:
        """What a forked child must never destroy."""


CLOSE_S = 5.0
"""Most seconds that closing waits for a text under way, and a thread, whose text the program's end stops, for it."""
_is_ending = threading.Event()
_watched: "weakref.WeakSet[Watched]" = weakref.WeakSet()


def watch(one: Watched) -> None:
    """Close it when the program ends without having done so, and leave it alone in forked children."""
    _watched.add(one)


@contextmanager
def beside(work: Callable[[], Made]) -> "Iterator[Future[Made]]":
    """Have work done on a thread of its own, which has ended when the block has.

    A pool of the standard library takes no work any more once the main thread has ended, which others may outlive.
    """
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:  # handed to whoever waits, on its own thread
            made.set_exception(error)

    thread = threading.Thread(target=run, name="mirrorsd-beside")
    thread.start()
    try:
        yield made
    finally:
        thread.join()


def refuse_to_leave(one: object) -> NoReturn:
    """Refuse to be pickled for another process.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"A {type(one).__name__} cannot go to another process: its devices are in this one. Give that process the path "
        "of the bundle, and load it there."
    )


def wait_for_end() -> None:
    """Keep a daemon's thread from telling an error that nobody has made: the program ends, and its text with it."""
    if _is_ending.is_set() and threading.current_thread().daemon:
        time.sleep(CLOSE_S)


def _end_devices() -> None:
    """Runs when the program ends, before the interpreter is taken down and after all threads that are no daemons."""
    _is_ending.set()
    until = perf_counter() + _WAIT_S
    try:
        for one in list(_watched):
            one.close()
        for thread in threading.enumerate():
            if thread.name.startswith(DEVICE_THREADS) and thread.daemon:
                thread.join(max(0.0, until - perf_counter()))
    except KeyboardInterrupt:  # the user does not want to wait for them
        pass
    if any(thread.name.startswith(DEVICE_THREADS) for thread in threading.enumerate()):
        _skip_destructors()


def _leave_behind() -> None:
    """Runs in a forked child: its copies of the vendors' objects stay as they are until the process is gone."""
    for one in list(_watched):
        for kept in one.inherited():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    if any(vendor in sys.modules for vendor in _VENDORS):
        _skip_destructors()


def _skip_destructors() -> None:
    """Let the process end with its own status, once Python is done, without the destructors of C++ libraries.

    `_exit` is called with the status, as the first of what the C library calls at exit; one without `on_exit` (glibc
    has it) keeps its destructors.
    """
    with suppress(OSError, AttributeError, TypeError):  # Windows names no program by None
        process = ctypes.CDLL(None)
        process.on_exit(process._exit, None)


atexit.register(_end_devices)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_behind)
