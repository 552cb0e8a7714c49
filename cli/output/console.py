"""What goes to stdout (results) and to stderr (progress and notes), on a terminal and in a pipe."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import list2cmdline
from time import perf_counter
from typing import TYPE_CHECKING, Protocol
from unicodedata import category

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mirrorsd.training.run.timed_run import RunProgress

_PIPE_COLUMNS = 140
_PIPE_SECONDS = 30.0
Advance = Callable[[str], None]


class ReportShare(Protocol):
    """Takes what is being done, and the share done, 0..1."""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show it."""


def as_word(path: Path) -> str:
    """A path as a shell reads it as one word.

    >>> as_word(Path("my bundle.mirror"))[1:-1]
    'my bundle.mirror'
    """
    return list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


def visible(text: str) -> str:
    r"""A text whose control characters are seen, not obeyed: a bundle's names must not steer a terminal.

    >>> print(visible("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(repr(char)[1:-1] if category(char) == "Cc" and char not in "\n\t" else char for char in text)


def print_json(document: Mapping[str, object]) -> None:
    """Print the one JSON object of a `--json` run, in ASCII: it arrives intact whatever the pipe's encoding."""
    print(json.dumps(document))


def print_table(table: Table) -> None:
    """Print a table; a pipe has no width of its own, so it gets `COLUMNS` or a generous one."""
    _console_for_tables().print(table)


def print_figures(table: Table) -> None:
    """Print a table of numbers, none of them cut: whole columns at its end are left out where it is too wide."""
    console, left_out = _console_for_tables(), list[str]()
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        column.no_wrap = not any(" " in cell for cell in cells)
        column.min_width = max(len(word) for cell in cells for word in cell.split() or [""])
        column.overflow = "fold"
    unbounded = console.options.update_width(sys.maxsize)
    while len(table.columns) > 1 and Measurement.get(console, unbounded, table).minimum > console.width:
        left_out.insert(0, str(table.columns.pop().header))
    console.print(table)
    if left_out:
        note(f"left out, as they do not fit into {console.width} columns: {', '.join(left_out)}")


def _console_for_tables() -> Console:
    is_wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_COLUMNS if is_wide else None)


def add_row(table: Table, *cells: str) -> None:
    """Add a row as it stands, and whole: rich would take `[cuda]` for a style, and cut a long name with an ellipsis."""
    table.add_row(*(Text(visible(cell), overflow="fold") for cell in cells))


def note(text: str, style: str = "") -> None:
    """Say something that is not a result; a style (of rich) shows on terminals only."""
    if style and sys.stderr.isatty():
        Console(stderr=True).print(Text(visible(text), style), soft_wrap=True)
    else:
        print(visible(text), file=sys.stderr, flush=True)


def note_error(message: str) -> None:
    """Say what went wrong: on a terminal with a red beginning."""
    if sys.stderr.isatty():
        Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {visible(message)}"), soft_wrap=True)
    else:
        print(f"error: {visible(message)}", file=sys.stderr, flush=True)


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
def show_loading(title: str) -> Iterator[ReportShare]:
    """Show that something loads, and what of it takes long: a spinner on a terminal, a line at the start in a pipe."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: note(stage) if fraction == 0.0 else None
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title)
        yield lambda stage, fraction: bar.update(task, description=stage)


@contextmanager
def show_share(title: str) -> Iterator[ReportShare]:
    """Show work that reports a stage and the share done, 0..1, and about how long the rest will take.

    A bar on a terminal; in a pipe a line per stage, and one every half minute within a stage.
    """
    if not sys.stderr.isatty():
        yield _plain_stages(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    started = perf_counter()
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0, left="")

        def report(stage: str, fraction: float) -> None:
            left = time_left(perf_counter() - started, fraction)
            bar.update(task, completed=fraction, description=f"{title}: {stage}", left=left)

        yield report


def time_left(elapsed: float, fraction: float) -> str:
    """Say about how long the rest will take if it goes on as it went; nothing in the first seconds of a long work.

    >>> time_left(60.0, 0.25), time_left(30.0, 0.9), time_left(3.0, 0.01), time_left(30.0, 0.01)
    ('about 3 min left', 'about 3 s left', '', 'about 50 min left')
    """
    if not 0.0 < fraction < 1.0 or (fraction < 0.05 and elapsed < 20):
        return ""
    seconds = elapsed * (1 - fraction) / fraction
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


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
    started = perf_counter()
    last_stage, last_line = "", started

    def report(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_line
        now = perf_counter()
        if stage == last_stage and now - last_line < _PIPE_SECONDS:
            return
        left = time_left(now - started, fraction)
        note(f"{title} ({fraction:.0%}{', ' if left else ''}{left}): {stage}")
        last_stage, last_line = stage, now

    return report


def _plain_lines(title: str, total: int) -> Advance:
    done = 0

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        note(f"{title} {done}/{total}: {text}")

    return advance
