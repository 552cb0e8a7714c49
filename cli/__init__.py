"""The `mirrorsd` command: one file per sub-command, heavy imports inside them."""

import gc
import sys

_OBJECTS_UNTIL_COLLECTED = 50_000
"""Imports make them by the hundred thousand, for good: looking through them every 700 takes 40 ms of each start."""


def main() -> None:
    """Run the command line and exit with its status (see `cli.output.failures` for the numbers)."""
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTED)
    try:
        from mirrorsd.cli.output.streams import prepare_streams

        prepare_streams()
        from mirrorsd.cli.application import run

        status = run(sys.argv[1:])
    except ModuleNotFoundError as error:  # typer and rich come with an extra
        from mirrorsd.cli.output.failures import EXIT_FAILED, about_import

        print(f"error: {about_import(error)}", file=sys.stderr)
        status = EXIT_FAILED
    except BaseException as error:  # Ctrl-C also in the imports above
        from mirrorsd.cli.output.failures import EXIT_CANCELLED
        from mirrorsd.cli.output.leaving import was_interrupted

        if not (was_interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
        status = EXIT_CANCELLED
    from mirrorsd.cli.output.leaving import leave

    leave(status)


__all__ = ["main"]
