"""What the scheduler's benchmarks share: which prompts, runs of several settings in turn, and the head of a report."""

import argparse
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.cli.input.prompt_file import read_questions, spread
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.ledger import Span
from mirrorsd.texts.speculation import resolve_speculation

Messages = list[dict[str, str]]
Found = TypeVar("Found")
FIRST_TOKEN = "time_to_first_token_ms"
FIGURES = ("tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to decode: a name for the table, the method, and values of `SpeculationConfig`."""

    name: str
    method: str = "mirror"
    speculation: dict[str, Any] = field(default_factory=dict)


class Changed(NamedTuple):
    """A number in capital letters, and another value."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}"


def changed(word: str) -> Changed:
    """What is given as `--with NAME=VALUE`.

    >>> changed("_MOST_AT_A_TABLE=4")
    Changed(name='_MOST_AT_A_TABLE', value=4)
    """
    name, _, value = word.partition("=")
    return Changed(name, int(value) if value.isdecimal() else float(value))


@contextmanager
def with_changed(number: Changed | None, modules: Iterable[ModuleType]) -> Iterator[None]:
    """Another value, in each of the modules that has this number; None changes nothing.

    Raises:
        SystemExit: no module has it.
    """
    if number is None:
        yield
        return
    owners = [module for module in modules if number.name in vars(module)]
    if not owners:
        raise SystemExit(f"--with {number}: there is no such number")
    with ExitStack() as values:
        for owner in owners:
            values.enter_context(patch.object(owner, number.name, number.value))
        yield


def parser(
    description: str | None, *, count: int = 12, tokens: int = 96, measures_steps: bool = False
) -> argparse.ArgumentParser:
    """The options that all of them take.

    Texts end at the model's own end, unless `--ignore-eos`. What `measures_steps`, not texts, always goes on: it
    wants as many steps as it can get, and says so in its report.
    """
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--prompts", type=Path, default=Path("samples/storyteller/prompts.jsonl"))
    found.add_argument("--count", type=int, default=count, help="how many prompts, spread over the file")
    found.add_argument("--tokens", type=int, default=tokens, help="most new tokens per text")
    found.add_argument("--output", type=Path)
    if measures_steps:
        found.set_defaults(ignore_eos=True)
    else:
        found.add_argument("--ignore-eos", action="store_true", help="go on past the end of text; the report says so")
    return found


def ends(options: argparse.Namespace) -> str:
    """What a report says about the ends of its texts: `honoured` or `ignored`."""
    return "ignored" if options.ignore_eos else "honoured"


def text_config(options: argparse.Namespace, temperature: float = 0.0) -> GenerationConfig:
    """How texts are decoded: greedily at temperature 0, otherwise to be given a seed by `seeded`."""
    return GenerationConfig(
        max_new_tokens=options.tokens, temperature=temperature, ignore_eos=options.ignore_eos, use_defaults=False
    )


def seeded(config: GenerationConfig, seed: int) -> GenerationConfig:
    """The same with a seed, where tokens are sampled; greedy texts have none."""
    return config.with_overrides({"seed": seed}) if config.is_sampling else config


def spread_prompts(path: Path, count: int, first: int = 0) -> list[Messages]:
    """`count` first turns, evenly spread over the file; another small `first` gives others."""
    questions = read_questions(path)
    turned = (*questions[first:], *questions[:first])
    return [[{"role": "user", "content": question.turns[0]}] for question in spread(turned, count)]


def enough(found: Sequence[Found], options: argparse.Namespace) -> Sequence[Found]:
    """What was read of the prompts' file, where a report counts on having as many as were asked for.

    Raises:
        SystemExit: there are fewer.
    """
    if len(found) < options.count:
        raise SystemExit(
            f"{options.prompts} has {len(found)} prompts, {options.count} were asked for: give --count {len(found)}, "
            "or --prompts with another file"
        )
    return found


def decode_all(
    pipe: MirrorPipeline, settings: Sequence[Setting], prompts: Sequence[Messages], config: GenerationConfig
) -> dict[str, list[GenerationResult]]:
    """Every setting on every prompt, in turn; which comes first rotates. One untimed text each before.

    Each setting has a session of its own, so that none finds a prompt that another one has read. Says where texts
    differ.
    """
    sessions = {s.name: pipe.session(resolve_speculation(pipe.speculation, s.speculation)) for s in settings}
    found: dict[str, list[GenerationResult]] = {setting.name: [] for setting in settings}
    for number, messages in enumerate([prompts[-1], *prompts]):
        shift = number % len(settings)
        for setting in (*settings[shift:], *settings[:shift]):
            chosen = seeded(config, number).with_overrides({"method": setting.method})
            result = sessions[setting.name].generate(messages=messages, config=chosen)
            found[setting.name].append(result)
        if len({tuple(results[-1].token_ids) for results in found.values()}) > 1:
            print(
                f"note: texts differ on prompt {number} (near ties: {[r[-1].stats.near_ties for r in found.values()]})"
            )
    for session in sessions.values():
        session.close()
    return {name: results[1:] for name, results in found.items()}


def speed(results: Sequence[GenerationResult]) -> float:
    """Tokens per second of several texts: all their tokens over all their time, so that no short text outweighs others.

    A text that was decoded several times counts once, with the median of its times.
    """
    times: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
    for result in results:
        key = tuple(result.prompt_ids), tuple(result.token_ids)
        times.setdefault(key, []).append(result.num_tokens / result.stats.tokens_per_second)
    return sum(len(ids) for _, ids in times) / sum(median(found) for found in times.values())


def sum_up(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """One row: the speed, figures per step averaged with the steps as weights, medians of the rest."""
    stats = [result.stats for result in results]
    steps = sum(stat.steps for stat in stats)
    row: dict[str, Any] = {"tokens_per_second": round(speed(results), 2)}
    row |= {name: round(median(getattr(stat, name) for stat in stats), 3) for name in ("prefill_ms", FIRST_TOKEN)}
    row["tokens_per_text"] = round(fmean(result.num_tokens for result in results), 2)
    for name in FIGURES:
        row[name] = round(sum(getattr(stat, name) * stat.steps for stat in stats) / steps, 4)
    sources = sorted({source for stat in stats for source in stat.reuse_by_source})
    row["reuse_by_source"] = {
        source: round(sum(stat.reuse_by_source.get(source, 0.0) * stat.steps for stat in stats) / steps, 4)
        for source in sources
    }
    row["step_ms"] = {name: round(median(stat.step_ms[name] for stat in stats), 4) for name in stats[0].step_ms}
    return row


def is_of_pass(span: Span) -> bool:
    """Whether it belongs to a pass of the target, reading its answer included."""
    return span.is_of_pass or (span.device, span.name) == ("target", "read")


def spans_in(result: GenerationResult, step: StepRecord) -> list[Span]:
    """What happened within a step."""
    return [span for span in result.spans if step.started <= span.start and span.end <= step.ended]


def header(bundle: Path, **values: object) -> dict[str, Any]:
    """The head of a report: bundle, machine, versions, and whatever the script adds; no paths, no host names."""
    machine = describe_machine() | {"system": f"{platform.system()} {platform.machine()}".replace("_", "-")}
    return {"bundle": bundle.name, **values, "machine": machine, "versions": installed_versions()}


def finish(report: dict[str, Any], output: Path | None) -> None:
    """Write the report, if a file is named; say it where ends of texts were ignored."""
    if report.get("ends") == "ignored":
        print("END OF TEXT IGNORED: texts went on after the model's own end")
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a plain table."""
    for row in rows:
        cells = [row.get(column) for column in columns]
        print("  ".join(f"{cell:>9.3f}" if isinstance(cell, float) else f"{cell!s:<26}" for cell in cells), flush=True)
