"""What goes to stdout (results) and to stderr (progress and notes), on a terminal and in a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mirrorsd.training.timed_run import RunProgress

_PIPE_COLUMNS = 140
Advance = Callable[[str], None]


class ReportShare(Protocol):
    """Takes what is being done, and the share done, 0..1."""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show it."""


def print_json(document: Mapping[str, object]) -> None:
    """Print the one JSON object of a `--json` run, in ASCII: it arrives intact whatever the pipe's encoding."""
    print(json.dumps(document))


def print_table(table: Table) -> None:
    """Print a table; a pipe has no width of its own, so it gets a generous one."""
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(table)


def add_row(table: Table, *cells: str) -> None:
    """Add a row as it stands: rich would take `[cuda]` for a style."""
    table.add_row(*(Text(cell) for cell in cells))


def note(text: str) -> None:
    """Say something that is not a result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show progress through `total` items: a bar on a terminal, a line per item in a pipe.

    The value given to the `with` block is called once per finished item, with words for what comes next.
    """
    if not sys.stderr.isatty():
        yield _plain_lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{title}: {text}")


@contextmanager
def show_share(title: str) -> Iterator[ReportShare]:
    """Show work that reports a stage and the share done, 0..1: a bar on a terminal, a line per stage in a pipe."""
    if not sys.stderr.isatty():
        yield _plain_stages(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda stage, fraction: bar.update(task, completed=fraction, description=f"{title}: {stage}")


@contextmanager
def training_bar(title: str) -> Iterator[Callable[["RunProgress"], None]]:
    """Show a training: a bar with losses and the time left on a terminal, a line per report in a pipe."""
    if not sys.stderr.isatty():
        yield lambda progress: note(f"{title}: {progress}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def show(progress: "RunProgress") -> None:
            words = f"{title}: {progress.losses_in_words()}, {progress.left_s:.0f} s left"
            bar.update(task, completed=progress.elapsed_s / progress.budget_s, description=words)

        yield show


def _plain_stages(title: str) -> ReportShare:
    last_stage = ""

    def report(stage: str, fraction: float) -> None:
        nonlocal last_stage
        if stage != last_stage:
            note(f"{title} ({fraction:.0%}): {stage}")
        last_stage = stage

    return report


def _plain_lines(title: str, total: int) -> Advance:
    done = 0

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        note(f"{title} {done}/{total}: {text}")

    return advance
