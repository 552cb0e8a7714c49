"""`mirrorsd tune`: find the fastest settings for this machine, show how they were found, keep them."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from mirrorsd.cli.commands.loading import first_turns, note_placement
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, read_questions, spread
from mirrorsd.cli.output.console import Advance, note, print_json, progress
from mirrorsd.cli.output.failures import EXIT_CANCELLED
from mirrorsd.cli.output.leaving import end_on_ctrl_c, first_ctrl_c_cancels
from mirrorsd.cli.output.tune_report import print_contests, print_parts, verdict
from mirrorsd.graphs.user_cache import check_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from mirrorsd import MirrorPipeline
    from mirrorsd.machine.tuning.search import Found


class OnTheConsole:
    """Tells the user how tuning goes on; `on_loaded` is called before that where there is something to keep."""

    def __init__(self, on_loaded: "Callable[[], None]") -> None:
        self._on_loaded = on_loaded

    def loaded(self, pipe: "MirrorPipeline") -> None:
        """Say what runs where."""
        note_placement(pipe)

    def begun(self) -> None:
        """From here on what was measured is kept, however it ends."""
        self._on_loaded()

    def note(self, text: str) -> None:
        """Say something that is not a result."""
        note(text)

    def progress(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Show progress."""
        return progress(title, total)


def tune(
    bundle: options.Bundle,
    prompts: Annotated[Path | None, typer.Option(help="Questions to try, in Spec-Bench's form.")] = None,
    device_map: options.DeviceMapName = "auto",
    max_new_tokens: options.MaxNewTokens = 64,
    max_seconds: Annotated[
        float, typer.Option("--seconds", help="What it may take; large models take longer for the least.", min=1)
    ] = 80.0,
    show_all: Annotated[bool, typer.Option("--all", help="Show every time and every contest.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest way to speculate on this machine; `generate` uses it from then on. Changes no token.

    Takes a minute and a half. Ctrl-C ends it, and keeps what it has found by then.
    """
    end_on_ctrl_c()
    from mirrorsd import CancelToken
    from mirrorsd.machine.tuning.search import NUM_TEXTS, document, find_settings

    started = perf_counter()
    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = spread(first_turns(bundle, questions), NUM_TEXTS)
    check_writable(bundle)
    cancel = CancelToken()
    found = find_settings(
        bundle,
        texts,
        device_map=device_map,
        max_new_tokens=max_new_tokens,
        seconds=max_seconds,
        cancel=cancel,
        listener=OnTheConsole(partial(first_ctrl_c_cancels, cancel)),
    )
    end_on_ctrl_c()
    path = found.tuned.write(bundle)
    seconds = perf_counter() - started
    if as_json:
        print_json({"seconds": round(seconds, 1), **document(found)})
    else:
        tell(found, path, seconds, show_all=show_all)
    if cancel.is_cancelled:
        raise typer.Exit(EXIT_CANCELLED)


def tell(found: "Found", path: Path, seconds: float, *, show_all: bool) -> None:
    """Print who won, and what is kept in `path`."""
    tuned = found.tuned
    for kind, contests in found.contests.items():
        print(verdict(kind, contests) if contests else f"{kind} texts: there was no time to measure any")
    if show_all:
        print_parts(found.parts)
        for kind, contests in found.contests.items():
            if contests:
                print_contests(f"{kind} texts", contests)
    step = f"predicted {tuned.predicted_step_ms} ms a step, measured {tuned.measured_step_ms} ms"
    what = step if tuned.is_tuned else "what passes and rounds take"
    if tuned.is_tuned and not any(found.contests.values()):
        what = f"what an earlier run had found, {step}"
    print(f"kept in {path}: layout {tuned.layout}; {what}. Took {seconds:.0f} s.")
