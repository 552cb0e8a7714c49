"""How the program ends: at once on Ctrl-C, on a new line, and never by an abort of a vendor's threads.

Device threads compute in C++, where no interrupt reaches them. A process that leaves while they do destroys objects
under them, and ends by `abort`. So it is ended without its destructors wherever such threads may be left.
"""

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from mirrorsd.cli.output.failures import EXIT_CANCELLED, EXIT_DONE, EXIT_FAILED, about_file
from mirrorsd.cli.output.streams import EXIT_PIPE, flush_streams, is_of_pipe

if TYPE_CHECKING:
    from mirrorsd import CancelToken

_PATIENCE_S = 1.5
"""How long an interrupted command may tidy up: close devices, remove a bar."""
_SHOW_CURSOR = "\033[?25h"
_DEVICE_THREADS = "mirrorsd-"
_STDERR = 2
_interrupted = threading.Event()
_terminal = _STDERR


def end_on_ctrl_c() -> None:
    """From here on Ctrl-C ends the program, wherever it is: status 130 at the latest after 1.5 seconds.

    For commands that leave nothing half-done behind. The interrupt is raised as usual, so that `with` blocks end;
    a vendor's callback, a finaliser or an import may swallow it or make another error of it, and a device may not
    come back. Neither keeps the program alive. What libraries say about having been interrupted is not shown.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def first_ctrl_c_cancels(token: "CancelToken") -> None:
    """From here on the first Ctrl-C only asks for an end, by `token`; the second is that of `end_on_ctrl_c`."""

    def ask(_: int, __: FrameType | None) -> None:
        token.cancel()
        end_on_ctrl_c()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, ask)


def give_ctrl_c_back() -> None:
    """Undo `end_on_ctrl_c`: a program that ran a command within itself goes on."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_interrupted() -> bool:
    """Whether Ctrl-C has come since `end_on_ctrl_c`."""
    return _interrupted.is_set()


def leave(status: int) -> NoReturn:
    """End the program with this status, whatever threads are left; 130 if it was interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_cancelled = was_interrupted() or status == EXIT_CANCELLED
    failure = flush_streams()
    if is_cancelled:
        _leave_cancelled()
    if failure is not None and status in (EXIT_DONE, EXIT_PIPE):
        status = EXIT_PIPE if is_of_pipe(failure) else EXIT_FAILED
        if status == EXIT_FAILED:
            with suppress(OSError):
                os.write(_STDERR, f"error: {about_file(failure)}\n".encode())
    if any(thread.name.startswith(_DEVICE_THREADS) for thread in threading.enumerate()):
        os._exit(status)
    sys.exit(status)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    if not _interrupted.is_set():
        _interrupted.set()
        _silence()
        start_new_thread(_leave_soon, ())  # takes none of the locks that the interrupted code may hold
    raise KeyboardInterrupt


def _leave_soon() -> None:
    time.sleep(_PATIENCE_S)
    _leave_cancelled()


def _silence() -> None:
    """Show nothing on stderr from here on, whoever writes there; the terminal itself stays at hand."""
    global _terminal
    with suppress(OSError):
        _terminal = os.dup(_STDERR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


def _leave_cancelled() -> NoReturn:
    """End without destructors, the terminal's cursor where the next prompt belongs: text may have ended in mid-line."""
    with suppress(OSError):
        if os.isatty(_terminal):
            os.write(_terminal, f"{_SHOW_CURSOR}\n".encode())
    os._exit(EXIT_CANCELLED)
