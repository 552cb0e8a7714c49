"""`mirrorsd bench`: Spec-Bench's way of measuring: its questions, its answer lines, its table, and a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from mirrorsd.cli.commands.loading import open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import read_questions
from mirrorsd.cli.input.requests import check_writable, has_chat_template
from mirrorsd.cli.output.console import note, print_figures, show_share
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.cli.output.leaving import end_on_ctrl_c
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.cli.bench.peers import PeerOption

_MOST_NAMED = 5
_NO_TEMPLATE = (
    "note: no chat template is used: questions are texts to go on with. Such texts repeat themselves sooner, which "
    "flatters every method"
)


Questions = Annotated[
    Path, typer.Argument(help="Spec-Bench or SPEED-Bench questions, as JSON lines.", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for answers, tables and the page.")]
Temperature = Annotated[
    float, typer.Option(help="0: greedy; above: sampled, by nothing else.", rich_help_panel=options.TEXT)
]
Seed = Annotated[
    int, typer.Option(help="Of the first run's texts, and of who goes first.", min=0, rich_help_panel=options.TEXT)
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a turn.", min=1, rich_help_panel=options.TEXT)]
Peers = Annotated[
    list[str] | None, typer.Option(help="Another runtime: RUNTIME=PROGRAM:MODEL[:DRAFT]; may be repeated.")
]


def bench(
    bundle: options.Bundle,
    questions: Questions,
    out: Out,
    methods: options.Methods = options.DRAFT_METHODS,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    runs: Annotated[int, typer.Option(help="How often every question is asked.", min=1)] = 3,
    max_tokens: MaxTokens = 1024,
    limit: Annotated[int | None, typer.Option(help="Questions per task, always the same ones.", min=1)] = None,
    peer: Peers = None,
    drafted: Annotated[int, typer.Option(help="Tokens that peers with a draft draft at a time.", min=1)] = 4,
    threads: Annotated[int | None, typer.Option(help="Of the peers; without it, one per core.", min=1)] = None,
    ignore_eos: options.IgnoreEos = False,
    is_raw: options.Raw = False,
    device_map: options.DeviceMapName = "auto",
    layout: options.Layout = None,
    settings: options.Settings = None,
    verbose: options.Verbose = False,
) -> None:
    """Measure methods as Spec-Bench does; goes on where a run of the same command was ended.

    Exit status 1 if our methods' texts differ.
    """
    from mirrorsd.cli.bench.measuring import measure
    from mirrorsd.cli.bench.peers import read_peer
    from mirrorsd.cli.bench.questions import choose
    from mirrorsd.cli.bench.running import Plan
    from mirrorsd.devices.layouts import usable_cores

    end_on_ctrl_c()
    check_out(out)
    plan = Plan(
        model=f"{bundle.stem}-temperature-{temperature:g}",
        questions=choose(read_questions(questions), limit),
        methods=options.read_methods(methods),
        runs=runs,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        is_raw=is_raw or not has_chat_template(bundle),
        peers=checked_peers([read_peer(text) for text in peer or ()], temperature),
        drafted=drafted,
        threads=threads or usable_cores().num_threads,
    )
    speed = options.read_settings(settings)
    with open_pipeline(bundle, device_map, speed, layout, is_verbose=verbose) as pipe:
        if plan.is_raw:
            note(_NO_TEMPLATE)
        with show_share("benchmark") as show:
            found = measure(pipe, bundle, plan, out, show)
    print_found(found, out)
    if not found["identical"]:
        raise typer.Exit(EXIT_FAILED)


def check_out(out: Path) -> None:
    """Refuse a place for the answers that is none.

    Raises:
        ConfigError: it is a file, its folder does not exist, or nothing can be written there.
    """
    from mirrorsd.cli.bench.running import SETTINGS

    try:
        if out.is_file() or not out.parent.is_dir():
            raise ConfigError(f"--out {out} is no place for a folder; give a folder, or a new name in one that exists.")
        first = out / SETTINGS if out.is_dir() else out
    except OSError as error:  # as for a name that is too long
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}. Give another place.") from error
    check_writable("--out", first)


def checked_peers(peers: "list[PeerOption]", temperature: float) -> "tuple[PeerOption, ...]":
    """Other runtimes as they may take part.

    Raises:
        ConfigError: two of one name, or texts that are sampled: every runtime has random numbers of its own.
    """
    if peers and temperature:
        raise ConfigError("--peer decodes greedily, as sampled texts would differ: leave --temperature at 0.")
    names = [each.name for each in peers]
    if len(set(names)) < len(names):
        raise ConfigError(f"--peer names {names[0]} twice; measure the other one with another --out.")
    return tuple(peers)


def print_found(found: Mapping[str, Any], out: Path) -> None:
    """Print the table, what is wrong with the texts, and where everything is."""
    from mirrorsd.cli.bench.report import REPORT, SUMMARY

    print_rows(found["rows"])
    for difference in found["differences"][:_MOST_NAMED]:
        note(
            "question {question_id}, run {run}, turn {turn}: {method} differs from {reference} at token "
            "{position}".format(**difference)
        )
    for name, count in found["other_texts"].items():
        note(f"{name}: {count} texts are others than ours" if count else f"{name}: all texts are ours")
    if found["left_out"]:
        note(f"{found['left_out']} questions are longer than the context, and were left out")
    if found["settings"]["card_is_paced"]:
        print(f"PACED: the times are those of the card {found['settings']['device_map']}, not of this machine")
    if found["settings"]["ends"] == "ignored":
        print("END OF TEXT IGNORED: tokens that come after the model's own end are counted, too")
    print(texts_in_words(found))
    note(f"wrote {out / SUMMARY} and {out / REPORT}")


def texts_in_words(found: Mapping[str, Any]) -> str:
    """Whether our methods wrote the same texts."""
    if len(found["settings"]["methods"]) == 1:
        return "One method alone: no texts to compare."
    return "All texts identical." if found["identical"] else f"{len(found['differences'])} texts are NOT identical."


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a row per task and method."""
    from mirrorsd.cli.bench.report import cells

    shown = [cells(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("task", "method", *shown[0]):
        table.add_column(title, justify="left" if title in ("task", "method") else "right")
    last = ""
    for row, of_row in zip(rows, shown, strict=True):
        if last and row["task"] != last:
            table.add_section()
        words = ("" if row["task"] == last else row["task"], row["method"], *of_row.values())
        table.add_row(*(Text(word) for word in words))
        last = row["task"]
    print_figures(table)
