"""The `mirrorsd` command: one file per sub-command, heavy imports inside them."""

import sys


def main() -> None:
    """Run the command line and exit with its status (see `cli.failures` for the numbers)."""
    from mirrorsd.cli.application import run

    sys.exit(run(sys.argv[1:]))


__all__ = ["main"]
