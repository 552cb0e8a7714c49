"""stdin, stdout and stderr as the caller left them: closed, full, of no width, or with a reader that has gone away.

A closed stream has its place taken, so that no file of a bundle is opened there and gets what was meant for a reader.
Notes to a closed stderr go nowhere. A result that cannot be written is an error, as for any program of Unix; a reader
that has read enough (`| head -1`) ends the program without a word, with the status of `SIGPIPE`.
"""

import errno
import os
import sys
from io import TextIOWrapper

EXIT_PIPE = 128 + 13
_KEEP_OPEN = {0: os.O_RDONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}
"""What a closed stream is opened for instead, on nothing: stdin is at its end, stdout cannot be written to."""


def prepare_streams() -> None:
    """Open what is closed, and read and write text as it is."""
    for number, access in _KEEP_OPEN.items():
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, access), number)  # its own number, where those below are open
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for as long as the program runs
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper) and _is_in_a_code_page(stream):
            stream.reconfigure(encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A story may hold characters that an old console's code page lacks; they must not end the program.
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, TextIOWrapper) and os.linesep == "\n":
        sys.stdin.reconfigure(newline="\n")  # a prompt's own carriage returns are text
    for size in ("COLUMNS", "LINES"):
        if not os.environ.get(size, "").strip("0"):  # of a terminal that does not know: rich would draw nothing
            os.environ.pop(size, None)


def _is_in_a_code_page(stream: TextIOWrapper) -> bool:
    """Whether it is a pipe or file that Windows would read in its code page, which nobody asked for."""
    return os.linesep != "\n" and "PYTHONIOENCODING" not in os.environ and not stream.isatty()


def is_of_pipe(error: BaseException | None) -> bool:
    """Whether it comes of a reader that has gone away, by itself or by what it was raised for."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return True
        error = error.__context__
    return False


def flush_streams() -> OSError | None:
    """Write what is left; what cannot be written is given up, and the first reason returned."""
    failure = None
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            failure = failure or error
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # Python would try again, and say so
        except (AttributeError, ValueError):  # closed by the program itself
            continue
    return failure
