"""The `mirrorsd` command: one file per sub-command, heavy imports inside them."""

import sys
from importlib.util import find_spec
from io import TextIOWrapper

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line and exit with its status (see `cli.output.failures` for the numbers)."""
    if absent := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(f"error: The mirrorsd command needs {' and '.join(absent)}: pip install 'mirrorsd[cli]'.")
    from mirrorsd.cli.application import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A story may hold characters that an old console's code page lacks; they must not end the program.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


__all__ = ["main"]
