"""The typer application: names of the sub-commands, the version, and what happens to errors."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer

from mirrorsd import __version__
from mirrorsd.cli.commands.loading import fetched
from mirrorsd.cli.input import options
from mirrorsd.cli.output import commit
from mirrorsd.cli.output.console import note, note_error
from mirrorsd.cli.output.failures import (
    EXIT_CANCELLED,
    EXIT_DONE,
    EXIT_FAILED,
    about_file,
    about_import,
    as_typed,
    exit_code,
)
from mirrorsd.cli.output.help_pages import Command, Group, examples
from mirrorsd.cli.output.leaving import give_ctrl_c_back, was_interrupted
from mirrorsd.cli.output.streams import EXIT_PIPE, is_of_pipe
from mirrorsd.graphs.errors import MirrorError

UsageError: Any = typer.BadParameter.__base__
"""Of click, which typer brings along under names of its own."""
_PACKAGE = "mirrorsd.cli.commands"
_COMMANDS = {
    "export": examples("mirrorsd export TARGET --draft DRAFT -o pair.mirror"),
    "compile": examples("mirrorsd compile pair.mirror --device-map cuda-npu"),
    "generate": examples(
        'mirrorsd generate pair.mirror "Why is the sky blue?"',
        "mirrorsd generate pair.mirror --raw < beginning.txt",
        'mirrorsd generate pair.mirror "Hi" -S gamma=4 --json',
    ),
    "chat": examples(
        "mirrorsd chat pair.mirror", "mirrorsd chat hf:OWNER/NAME", "mirrorsd chat --url http://127.0.0.1:8600"
    ),
    "serve": examples("mirrorsd serve pair.mirror"),
    "front": examples("mirrorsd front http://pc1:8600 http://pc2:8600"),
    "compare": examples("mirrorsd compare pair.mirror", "mirrorsd compare pair.mirror --by-category"),
    "bench": examples(
        "mirrorsd bench pair.mirror question.jsonl -o results",
        "mirrorsd bench pair.mirror q.jsonl -o out --limit 10",
    ),
    "inspect": examples("mirrorsd inspect pair.mirror"),
    "pairs": examples("mirrorsd pairs", "mirrorsd pairs --online"),
    "pack": examples("mirrorsd pack pair.mirror", "mirrorsd pack pair.mirror -o packed"),
    "push": examples("mirrorsd push packed OWNER/NAME"),
    "devices": examples("mirrorsd devices", "mirrorsd devices --all"),
    "doctor": examples("mirrorsd doctor", "mirrorsd doctor pair.mirror"),
    "simulate": examples("mirrorsd simulate pair.mirror --record pair.npz"),
    "trace": examples("mirrorsd trace trace.json", "mirrorsd trace trace.json -o trace.svg"),
    "tune": examples("mirrorsd tune pair.mirror"),
}
"""Examples of each command; the command is the function of that name in the module of that name."""
_FOLDERS = {"devices": "machine", "doctor": "machine", "pack": "sharing", "push": "sharing"}
"""Where a command's module lies, if not beside the others'."""
_GROUPS = {"train": "train.group", "cache": "machine.cache"}
"""Commands with commands of their own, and the modules whose `app` they are."""


def with_folders(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, which gets a folder for each bundle reference once all that was typed is understood."""
    parameters = signature(command).parameters.values()
    names = [one.name for one in parameters if one.annotation in (options.Bundle, options.MaybeBundle)]

    @wraps(command)
    def begin(**given: Any) -> None:
        command(**{name: fetched(value) if name in names and value else value for name, value in given.items()})

    return begin if names else command


@cache
def application(only: str | None = None) -> typer.Typer:
    """The command line; with `only` that one command of it, since reading the others' options takes time."""
    app = typer.Typer(
        name="mirrorsd",
        cls=Group,
        help="Export a pair of language models to a mirror bundle and run it on two devices at once.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_main)
    for name, epilog in _COMMANDS.items():
        if only in (None, name):
            module = ".".join(part for part in (_PACKAGE, _FOLDERS.get(name), name) if part)
            app.command(cls=Command, epilog=epilog)(with_folders(getattr(import_module(module), name)))
    for name, module in _GROUPS.items():
        if only in (None, name):
            app.add_typer(import_module(f"{_PACKAGE}.{module}").app, name=name)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        found = commit.source_commit()
        typer.echo(f"mirrorsd {__version__}{f' ({found})' if found else ''}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors become one message on stderr, without a traceback."""
    try:
        first = arguments[0] if arguments else None
        app = application(first if first in _COMMANDS or first in _GROUPS else None)
        status = app(arguments, prog_name="mirrorsd", standalone_mode=False)
    except SystemExit as finished:
        status = EXIT_PIPE if is_of_pipe(finished) else finished.code
    except (KeyboardInterrupt, typer.Abort) as stop:
        if isinstance(stop.__cause__, EOFError):  # of a file, which typer takes for somebody who ends
            raise stop.__cause__ from None
        return EXIT_CANCELLED
    except (MirrorError, ImportError, OSError) as error:
        return EXIT_PIPE if isinstance(error, BrokenPipeError) else _fail(error)
    except UsageError as error:
        _explain(error)
        return int(error.exit_code)
    finally:
        give_ctrl_c_back()
    return status if isinstance(status, int) else EXIT_DONE


def _fail(error: MirrorError | ImportError | OSError) -> int:
    if was_interrupted():  # what an interrupt becomes on its way through a vendor's code
        return EXIT_CANCELLED
    if isinstance(error, MirrorError):
        note_error(as_typed(str(error)))
        return exit_code(error)
    note_error(about_import(error) if isinstance(error, ImportError) else about_file(error))
    return EXIT_FAILED


def _explain(error: Any) -> None:
    """Say what is wrong with a command line, and where its help is; help itself where nothing was asked for."""
    if error.message.startswith("Usage:"):
        error.show()
        return
    note_error(error.format_message())
    if error.ctx is not None:
        note(f"Try '{error.ctx.command_path} --help'.")
