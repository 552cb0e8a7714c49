"""`mirrorsd compare`: the same questions by several methods: speeds, and whether the texts are the same."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mirrorsd.cli.commands.loading import note_placement, open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, Question, read_questions
from mirrorsd.cli.output.comparison import ALL_CATEGORIES, Answer, Difference, find_differences, measure, summarise
from mirrorsd.cli.output.console import add_row, note, print_json, print_table, progress
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
    from mirrorsd.runtime.session import MirrorSession

_OTHER_TEXT = [7, 7, 7]
"""What a session reads between two conversations, so that none finds its prompt read already."""
_COLUMNS = (
    ("tokens_per_second", "tokens/s", 1),
    ("prefill_ms", "prompt ms", 1),
    ("time_to_first_token_ms", "first token ms", 1),
    ("tokens_per_step", "tokens per step", 2),
    ("mean_accepted", "accepted", 2),
    ("reuse_rate", "reuse rate", 2),
    ("draft_exposed_ms", "draft exposed ms", 2),
    ("overlap", "overlap", 2),
)


def compare(
    bundle: options.Bundle,
    prompts: Annotated[
        Path | None, typer.Option(help="Spec-Bench JSONL file; without it, a few built-in ones.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = ",".join(options.METHODS),
    category: Annotated[list[str] | None, typer.Option(help="Only this category; may be repeated.")] = None,
    by_category: Annotated[bool, typer.Option("--by-category", help="Rows per category in the JSON too.")] = False,
    is_raw: Annotated[bool, typer.Option("--raw", help="Go on with the prompts as text; no chat template.")] = False,
    repeats: Annotated[int, typer.Option(help="Measure every question this often.", min=1)] = 1,
    device_map: options.DeviceMapName = "auto",
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    greedy: options.Greedy = False,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    gamma: options.Gamma = None,
    roots: options.Roots = None,
    root_source: options.RootSource = None,
    allocation: options.Allocation = None,
    passes: options.Passes = None,
    window: options.Window = None,
    exits: options.Exits = None,
    pad_rows_to: options.PadRowsTo = None,
    layout: options.Layout = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure several methods on the same questions. Exit status 1 if their texts differ."""
    from mirrorsd import GenerationConfig

    chosen_methods = read_methods(methods)
    questions = choose_questions(read_questions(prompts) if prompts else BUILT_IN_QUESTIONS, category or [])
    sampling = {**options.decoding(temperature, greedy=greedy), "top_k": top_k, "top_p": top_p, "seed": seed}
    config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, **sampling)
    roots_settings = {"roots": roots, "root_source": root_source, "allocation": allocation}
    speed = {"gamma": gamma, "passes": passes, "window": window, "pad_rows_to": pad_rows_to, **roots_settings}
    with open_pipeline(bundle, device_map, {**speed, "exits": options.read_exits(exits)}, layout) as pipe:
        note_placement(pipe)
        answer = answer_with(pipe, config, is_raw=is_raw or not has_chat_template(bundle))
        with progress("comparing", len(questions) * repeats) as advance:
            measurements = measure(questions, chosen_methods, repeats, answer, advance)
        where, is_paced = {"device_map": pipe.device_map.name, "layout": pipe.layout}, pipe.device_map.pace is not None
    rows, differences = summarise(measurements, chosen_methods), find_differences(measurements)
    note_differences(differences)
    if as_json:
        shown = rows if by_category or category else [row for row in rows if row["category"] == ALL_CATEGORIES]
        where |= {"ends": "ignored" if ignore_eos else "honoured"}
        print_json(report_document(bundle, where, shown, is_identical=not differences))
    else:
        print_rows(rows)
        print_verdict(where["device_map"], is_paced=is_paced, ignores_ends=ignore_eos, is_identical=not differences)
    if differences:
        raise typer.Exit(EXIT_FAILED)


def print_verdict(card: str, *, is_paced: bool, ignores_ends: bool, is_identical: bool) -> None:
    """Say whose times these were, of what, and whether the texts are the same."""
    if is_paced:
        print(f"PACED: the times are those of the card {card}, not of this machine")
    if ignores_ends:
        print("END OF TEXT IGNORED: tokens that come after the model's own end are counted, too")
    print(f"identical: {'yes' if is_identical else 'no'}")


def note_differences(differences: Iterable[Difference]) -> None:
    """Say where texts differ."""
    for difference in differences:
        note(
            f"question {difference.question_id}, turn {difference.turn}: {difference.method} differs from "
            f"{difference.reference} at token {difference.position}"
        )


def as_asked(bundle: Path, turns: Sequence[str]) -> list[str | list[dict[str, str]]]:
    """First turns as `compare` asks them: through the chat template, if the bundle has one."""
    return [[{"role": "user", "content": turn}] if has_chat_template(bundle) else turn for turn in turns]


def has_chat_template(bundle: Path) -> bool:
    """Whether the bundle's tokenizer brings a chat template."""
    return (bundle / names.TOKENIZER_FOLDER / "chat_template.jinja").is_file()


def answer_with(pipe: "MirrorPipeline", config: "GenerationConfig", *, is_raw: bool) -> Answer:
    """How one turn is answered: by the chat template, or as raw text that goes on after all that was said.

    Every method has a session of its own, which forgets the last conversation before the next: every prompt is read.
    All turns get the seed of the config; where it has none, one is drawn for all, and told.
    """
    config = config.resolve(pipe.manifest.generation)
    if config.seed is not None:
        note(f"seed: {config.seed}")
    sessions: dict[str, MirrorSession] = {}

    def answer(method: str, messages: list[dict[str, str]]) -> "GenerationResult":
        name = options.checked_method(method)
        if name not in sessions:
            sessions[name] = pipe.session()
        if len(messages) == 1:
            sessions[name].generate(
                token_ids=_OTHER_TEXT, max_new_tokens=2, temperature=0.0, ignore_eos=True, method="serial"
            )
        if is_raw:
            text = "\n\n".join(message["content"] for message in messages)
            return sessions[name].generate(text, config, method=name)
        return sessions[name].generate(None, config, messages=messages, method=name)

    return answer


def read_methods(text: str) -> tuple[str, ...]:
    """Split the list of methods.

    Raises:
        ConfigError: an unknown method, one named twice, or none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"--methods is {text!r}; allowed: different ones of {', '.join(options.METHODS)}.")
    return tuple(options.checked_method(name) for name in names)


def choose_questions(questions: tuple[Question, ...], categories: list[str]) -> tuple[Question, ...]:
    """Keep the questions of the named categories; all where none is named.

    Raises:
        ConfigError: a category that no question has.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories:
        if category not in known:
            raise ConfigError(f"No question has the category {category!r}; there are {', '.join(known)}.")
    return tuple(question for question in questions if not categories or question.category in categories)


def report_document(
    bundle: Path, where: dict[str, str], rows: list[dict[str, Any]], *, is_identical: bool
) -> dict[str, Any]:
    """The object of `compare --json`."""
    return {
        "bundle": str(bundle),
        **where,
        "machine": describe_machine(),
        "versions": installed_versions(),
        "identical": is_identical,
        "rows": rows,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print one table per category; a single category needs no table of means."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    shown = categories[:1] if len(categories) == 2 else categories
    for category in shown:
        table = Table("method", title=category, title_justify="left")
        for _, title, _ in _COLUMNS:
            table.add_column(title, justify="right")
        for row in rows:
            if row["category"] == category:
                cells = ("-" if row[key] is None else f"{row[key]:.{digits}f}" for key, _, digits in _COLUMNS)
                add_row(table, row["method"], *cells)
        print_table(table)
