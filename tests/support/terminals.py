"""A program on a terminal of its own, started without a copy of this process.

`pty.fork` copies a process that has loaded PyTorch, OpenVINO and their threads. Now and then the copy dies before it
has become the program. So a program that has loaded nothing takes the terminal, and becomes it.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"


class OnTerminal(NamedTuple):
    """The program, and our end of its terminal."""

    process: subprocess.Popen[bytes]
    terminal: int


def start(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, size: tuple[int, int] = (24, 80)
) -> OnTerminal:
    """Start this Python with `arguments` on a terminal of so many rows and columns; Ctrl-C there interrupts it."""
    import fcntl
    import pty
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    command = [sys.executable, "-S", "-c", _TAKE, sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=dict(environment or os.environ), start_new_session=True
    )
    os.close(its)
    return OnTerminal(process, ours)
