"""`mirrorsd compare`: the same questions by several methods: speeds, and whether the texts are the same."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from mirrorsd.cli.commands.loading import open_pipeline
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, Question, read_questions
from mirrorsd.cli.input.requests import has_chat_template
from mirrorsd.cli.output.comparison import (
    ALL_CATEGORIES,
    Answer,
    Difference,
    about_draft,
    find_differences,
    measure,
    summarise,
    verdict,
)
from mirrorsd.cli.output.console import note, print_figures, print_json, progress
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.cli.output.leaving import end_on_ctrl_c
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
    from mirrorsd.runtime.session import MirrorSession


def compare(
    bundle: options.Bundle,
    prompts: options.Questions = None,
    methods: options.Methods = options.DRAFT_METHODS,
    category: Annotated[list[str] | None, typer.Option(help="Only this category; may be repeated.")] = None,
    by_category: Annotated[bool, typer.Option("--by-category", help="Rows per category too.")] = False,
    is_raw: options.Raw = False,
    repeats: Annotated[int, typer.Option(help="Measure every question this often.", min=1)] = 1,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    greedy: options.Greedy = False,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    device_map: options.DeviceMapName = "auto",
    layout: options.Layout = None,
    settings: options.Settings = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure several methods on the same questions. Exit status 1 if their texts differ, or if the draft is dead."""
    from mirrorsd.machine.doctor.draft_length import measure_draft

    end_on_ctrl_c()
    chosen_methods = options.read_methods(methods)
    questions = choose_questions(read_questions(prompts) if prompts else BUILT_IN_QUESTIONS, category or [])
    speed = options.read_settings(settings)
    asked: dict[str, Any] = {"temperature": temperature, "greedy": greedy, "top_k": top_k, "top_p": top_p}
    asked |= {"min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop}
    config = options.text_config(asked, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    with open_pipeline(bundle, device_map, speed, layout, is_verbose=verbose) as pipe:
        answer = answer_with(pipe, config, is_raw=is_raw or not has_chat_template(bundle))
        with progress("comparing", len(questions) * repeats) as advance:
            measurements = measure(questions, chosen_methods, repeats, answer, advance)
        draft = measure_draft(pipe)
        where, is_paced = {"device_map": pipe.device_map.name, "layout": pipe.layout}, pipe.device_map.pace is not None
    rows, differences = summarise(measurements, chosen_methods), find_differences(measurements)
    shown = rows if by_category or category else [row for row in rows if row["category"] == ALL_CATEGORIES]
    note_differences(differences)
    if as_json:
        where |= {"ends": "ignored" if ignore_eos else "honoured"}
        print_json(report_document(bundle, where, shown, is_identical=not differences))
    else:
        print_rows(shown)
        card = where["device_map"] if is_paced else ""
        print_verdict(rows, card=card, ignores_ends=ignore_eos, is_identical=not differences)
    note(draft.words)
    if differences or not draft.is_fine:
        raise typer.Exit(EXIT_FAILED)


def print_verdict(rows: list[dict[str, Any]], *, card: str, ignores_ends: bool, is_identical: bool) -> None:
    """Say whose times these were (of a paced `card`?), of what, how much was gained, whether the texts are the same."""
    if card:
        print(f"PACED: the times are those of the card {card}, not of this machine")
    if ignores_ends:
        print("END OF TEXT IGNORED: tokens that come after the model's own end are counted, too")
    if about := about_draft(rows):
        print(about)
    print(verdict(rows, is_identical=is_identical))


def note_differences(differences: Iterable[Difference]) -> None:
    """Say where texts differ."""
    for difference in differences:
        note(
            f"question {difference.question_id}, turn {difference.turn}: {difference.method} differs from "
            f"{difference.reference} at token {difference.position}"
        )


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
            sessions[name].forget()
        if is_raw:
            text = "\n\n".join(message["content"] for message in messages)
            return sessions[name].generate(text, config, method=name)
        return sessions[name].generate(None, config, messages=messages, method=name)

    return answer


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
    """Print one table: a row per method, under each other's category where there are several; the fastest is bold."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    table = Table("method", box=box.SIMPLE_HEAD)
    if len(categories) > 1:
        table = Table("questions", "method", box=box.SIMPLE_HEAD)
    for title in ("tokens/s", "times plain", "tokens per pass", "draft right", "waiting"):
        table.add_column(title, justify="right")
    for category in categories:
        of_category = [row for row in rows if row["category"] == category]
        fastest = max(row["tokens_per_second"] for row in of_category)
        for number, row in enumerate(of_category):
            names = [category if not number else ""] if len(categories) > 1 else []
            style = "bold" if row["tokens_per_second"] == fastest else ""
            table.add_row(*(Text(cell, style) for cell in (*names, *_cells(row))))
        table.add_section()
    print_figures(table)


def _cells(row: dict[str, Any]) -> list[str]:
    """Method, speed and what it came from, as people read it; nothing where there is nothing to say."""
    is_plain = row["method"] == "plain"
    forms = {
        "times_plain": "{:.2f}",
        "tokens_per_step": "{:.2f}",
        "draft_right": "{:.0%}",
        "draft_exposed_ms": "{:.1f} ms",
    }
    cells = [row["method"], f"{row['tokens_per_second']:.1f}"]
    for name, form in forms.items():
        is_empty = row[name] is None or (is_plain and name in ("draft_right", "draft_exposed_ms"))
        cells.append("" if is_empty else form.format(row[name]))
    return cells
