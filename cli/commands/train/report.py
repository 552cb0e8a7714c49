"""`mirrorsd train report`: what a draft and a target's exits are worth, on text that the target writes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mirrorsd.cli.commands.train import target as shared
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import Question, read_questions
from mirrorsd.cli.input.requests import check_writable
from mirrorsd.cli.output.console import add_row, note, print_json, print_table
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import write_whole

if TYPE_CHECKING:
    from mirrorsd.training.text.self_text import SelfText

_NEW_TOKENS = 128
_SAMPLED_TEXTS = 24
_TOKENS = 512

Draft = Annotated[Path | None, typer.Option(help="Folder of the draft.", show_default=False)]
Heads = Annotated[
    list[Path] | None, typer.Option("--head", help="Folder of a drafting head; may be repeated.", show_default=False)
]


def report(
    target: shared.Target,
    prompts: Annotated[Path, typer.Option(help="Questions in Spec-Bench's form.", show_default=False)],
    draft: Draft = None,
    head: Heads = None,
    baseline: Annotated[Path | None, typer.Option(help="An s = 0 draft to compare with.")] = None,
    only: Annotated[
        str, typer.Option(help="Sections: agreement,windows,confirmed,misses,sampling.")
    ] = "agreement,windows,confirmed,misses,sampling",
    per_task: Annotated[int | None, typer.Option(min=1, help="Questions per category; all without it.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Keep what follows once a text repeats itself.")] = False,
    threads: shared.Threads = 0,
    device: shared.Device = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the report there as JSON.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Report agreement, accepted windows, confirmed tokens, where the draft missed, and sampling with shared noise."""
    questions = _first_per_task(read_questions(prompts), per_task)
    sections = read_sections(only)
    check_writable("--output", output)
    checkpoint = shared.open_target(target, trained=0, tokens=_TOKENS, threads=threads, device=device)
    if draft is None and not head:
        raise ConfigError("there is nothing to report on; give --draft, --head or both")
    check_speaks_like(target, [folder for folder in (draft, baseline) if folder])
    model = shared.load_target(checkpoint)
    pair = None if draft is None else load_pair(model, checkpoint.folder, draft, baseline)
    heads = by_name(head or [])
    check_heads(model, heads)
    greedy, sampled = write_answers(model, checkpoint.folder, questions, checkpoint.eos_ids)
    if not any(greedy.values()):
        raise ConfigError(f"--prompts {prompts}: none of {len(questions)} questions fits the target's context")
    if not whole:
        from mirrorsd.training.text.self_text import cut_before_loop

        greedy = {task: [cut_before_loop(text) for text in texts] for task, texts in greedy.items()}
    found: dict[str, Any] = {
        "text": f"{len(questions)} questions of {prompts.name}, answered greedily by the target"
        + ("" if whole else ", before loops begin")
    }
    if pair is not None:
        found |= _report_draft(pair, greedy, sampled, sections)
    found["heads"] = report_heads(model, heads, greedy, sampled)
    found |= {"machine": describe_machine(), "versions": installed_versions()}
    if output is not None:
        write_whole(output, f"{json.dumps(found, indent=2)}\n".encode())
    print_json(found) if as_json else print_report(found)


def _report_draft(pair: Any, greedy: Any, sampled: list["SelfText"], sections: tuple[str, ...]) -> dict[str, Any]:
    from mirrorsd.training.reports.pair_report import report_pair

    return report_pair(pair, greedy, sampled, sections=sections, show=lambda words: note(f"measured {words}"))


def read_sections(text: str) -> tuple[str, ...]:
    """Read `agreement,misses`.

    Raises:
        ConfigError: there is no such section.
    """
    from mirrorsd.training.reports.pair_report import check_sections

    sections = tuple(part.strip() for part in text.split(","))
    check_sections(sections)
    return sections


def by_name(folders: list[Path]) -> dict[str, Path]:
    """Folders by their names; those that share one by their paths, as they were given."""
    names = [folder.name for folder in folders]
    return {folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in folders}


def check_heads(model: Any, heads: dict[str, Path]) -> None:
    """Read every head once, so that the target does not answer for one that cannot be read or is another target's."""
    from mirrorsd.training.heads.head_folder import load_head

    for folder in heads.values():
        load_head(folder, model)


def report_heads(
    model: Any, heads: dict[str, Path], greedy: dict[str, list["SelfText"]], sampled: list["SelfText"]
) -> dict[str, Any]:
    """What drafting heads are worth, by their names."""
    from mirrorsd.training.heads.head_folder import load_head
    from mirrorsd.training.heads.head_report import report_head

    return {name: report_head(model, load_head(folder, model), greedy, sampled) for name, folder in heads.items()}


def check_speaks_like(target: Path, drafts: list[Path]) -> None:
    """Refuse drafts with another vocabulary before any weights are read.

    Raises:
        ExportError: a draft is not complete, or its tokens are not the target's.
    """
    from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
    from mirrorsd.export.checkpoints.compatibility import check_compatible

    for folder in drafts:
        check_compatible(open_checkpoint(target, "target"), open_checkpoint(folder, "draft"))


def load_pair(model: Any, target: Path, draft: Path, baseline: Path | None) -> Any:
    """The loaded target with the adapters beside it (half depth untrained where there are none), and the drafts."""
    from mirrorsd.graphs.names import EXIT_ADAPTERS_FILE
    from mirrorsd.training.exit_adapter import load_adapters
    from mirrorsd.training.models.streaming_draft import StreamingDraft
    from mirrorsd.training.reports.pair_report import TrainedPair

    embedding = model.get_input_embeddings().weight
    exits: dict[int, Any] = {max(1, model.config.num_hidden_layers // 2): None}
    if (target / EXIT_ADAPTERS_FILE).is_file():
        exits = dict(load_adapters(target))
    return TrainedPair(
        target=model,
        exits=exits,
        draft=StreamingDraft.load(draft, embedding).to(model.device),
        baseline=None if baseline is None else StreamingDraft.load(baseline, embedding).to(model.device),
    )


def measure_drafts(model: Any, draft: Path, baseline: Path | None, work: Path) -> dict[str, Any]:
    """Agreement, windows and confirmed tokens of a new draft on some of the held-back text."""
    from mirrorsd.training.reports.pair_report import report_pair

    texts = shared.held_back_texts(work)[:: max(1, len(shared.held_back_texts(work)) // 40)]
    pair = load_pair(model, draft, draft, baseline)
    sections = ("agreement", "windows", "confirmed")
    found = report_pair(pair, {"held back": texts}, [], sections=sections, show=lambda words: note(f"measured {words}"))
    (work / "draft_report.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def write_answers(
    model: Any, target: Path, questions: tuple[Question, ...], ends: tuple[int, ...]
) -> tuple[dict[str, list["SelfText"]], list["SelfText"]]:
    """Greedy answers by category, and some first turns answered at temperature 1."""
    from mirrorsd.training.text.answers import answer, sample
    from mirrorsd.training.text.self_prompts import load_tokenizer

    tokenizer = load_tokenizer(target)
    turns: dict[str, list[tuple[str, ...]]] = {}
    for question in questions:
        turns.setdefault(question.category, []).append(question.turns)
    note(f"the target answers {len(questions)} questions")
    greedy = {task: answer(model, tokenizer, asked, ends, _NEW_TOKENS) for task, asked in turns.items()}
    asked = [question.turns[0] for question in questions]
    chosen = asked[:: max(1, len(asked) // _SAMPLED_TEXTS)]
    return greedy, sample(model, tokenizer, chosen, ends, _NEW_TOKENS)


def _first_per_task(questions: tuple[Question, ...], count: int | None) -> tuple[Question, ...]:
    if count is None:
        return questions
    kept: dict[str, list[Question]] = {}
    for question in questions:
        kept.setdefault(question.category, []).append(question)
    return tuple(question for asked in kept.values() for question in asked[:count])


def print_report(found: dict[str, Any]) -> None:
    """Show a report as tables."""
    for of_head in found.get("heads", {}).values():
        print_head_report(of_head)
    if "agreement" in found:
        shares = found["agreement"]
        streams = " / ".join(f"{share:.1%}" for share in shares["streams"])
        print(
            f"main row equals the target at {shares['main']:.1%} of {shares['positions']} positions; streams {streams}"
        )
    if "windows" in found:
        reference = _way(found["windows"]["reference"])
        print(f"right tokens in a row of a window, by how it was drafted; shares are of the last row ({reference})")
        print_table(_window_table(found["windows"]))
    if "confirmed" in found:
        print(f"the draft confirms {found['confirmed']['tokens_per_pass']} tokens per round by itself")
    if "misses" in found:
        print(
            f"where the draft's best token is wrong ({found['misses']['misses']} places): how often the target's own "
            "token is among the first 1, 2, 4 or 8 other guesses"
        )
        print_table(_miss_table(found["misses"]))
    if "sampling" in found:
        accepted = found["sampling"]["accepted_per_window"]
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in accepted.items())
        print(f"accepted per window at temperature 1: {shown}")


def print_head_report(found: dict[str, Any]) -> None:
    """Show a head's report as a table."""
    guesses = [str(number) for number in range(1, len(found["agreement"]) + 1)]
    table = Table(f"{found['kind']}, {found['parameters'] / 1e6:.2f} M parameters: guess", *guesses, "tokens per step")
    add_row(table, "right, told the text before it", *(f"{share:.1%}" for share in found["agreement"]), "")
    for name, words in (("greedy", "right with all before it, T=0"), ("sampled", "the same at T=1, shared noise")):
        of_text = found[name]
        add_row(table, words, *(f"{share:.1%}" for share in of_text["reaches"]), f"{of_text['tokens_per_step']:.2f}")
    print_table(table)


def _window_table(windows: dict[str, Any]) -> Table:
    ways = {way: row for way, row in windows.items() if isinstance(row, dict)}
    tasks = list(next(iter(ways.values()))["by_task"])
    table = Table("drafted by", "mean", "share", *tasks)
    for way, row in ways.items():
        share = row.get("share_of_reference")
        by_task = (f"{row['by_task'][task]['mean_accepted']:.2f}" for task in tasks)
        add_row(table, _way(way), f"{row['mean_accepted']:.2f}", "" if share is None else f"{share:.1%}", *by_task)
    return table


def _miss_table(misses: dict[str, Any]) -> Table:
    table = Table("guesses of", *map(str, (1, 2, 4, 8)))
    for name, shares in misses.items():
        if isinstance(shares, dict):
            kind, _, layer = name.partition("_")
            whose = {"draft": "the draft", "exit": f"the exit after layer {layer}", "both": "that exit or the draft"}
            add_row(table, whose[kind], *(f"{share:.1%}" for share in shares.values()))
    return table


def _way(name: str) -> str:
    """How a window was drafted, in words: reports say `J=2` for two rounds, and `s=0` for a draft without streams."""
    passes = name.removeprefix("J=")
    if passes != name:
        return "1 round" if passes == "1" else f"{passes} rounds"
    return (
        name.replace("s=0", "a draft without streams")
        .replace("main rows alone", "a token a round")
        .replace("passes", "rounds")
    )
