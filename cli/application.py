"""The typer application: names of the sub-commands, the version, and what happens to errors."""

import sys
from typing import Annotated

import typer

from mirrorsd import __version__
from mirrorsd.cli.commands.cache import app as cache
from mirrorsd.cli.commands.chat import chat
from mirrorsd.cli.commands.compare import compare
from mirrorsd.cli.commands.compile import compile
from mirrorsd.cli.commands.devices import devices
from mirrorsd.cli.commands.doctor import doctor
from mirrorsd.cli.commands.export import export
from mirrorsd.cli.commands.generate import generate
from mirrorsd.cli.commands.inspect import inspect
from mirrorsd.cli.commands.pairs import pairs
from mirrorsd.cli.commands.serve import serve
from mirrorsd.cli.commands.simulate import simulate
from mirrorsd.cli.commands.trace import trace
from mirrorsd.cli.commands.train.group import app as train
from mirrorsd.cli.commands.tune import tune
from mirrorsd.cli.output.failures import EXIT_CANCELLED, EXIT_DONE, exit_code
from mirrorsd.graphs.errors import MirrorError

app = typer.Typer(
    name="mirrorsd",
    help="Export a pair of language models to a mirror bundle and run it on two devices at once.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(export, compile, generate, chat, serve, compare, inspect, pairs, devices, doctor, simulate, trace, tune),
):
    app.command()(command)
app.add_typer(train, name="train")
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mirrorsd {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors become one message on stderr, without a traceback."""
    try:
        app(arguments, prog_name="mirrorsd")
    except SystemExit as finished:
        return finished.code if isinstance(finished.code, int) else EXIT_DONE
    except KeyboardInterrupt:
        return EXIT_CANCELLED
    except MirrorError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return EXIT_DONE
