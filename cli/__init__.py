"""The `mirrorsd` command: one file per sub-command, heavy imports inside them."""

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line and exit with its status (see `cli.failures` for the numbers)."""
    from mirrorsd.cli.application import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A story may hold characters that an old console's code page lacks; they must not end the program.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


__all__ = ["main"]
