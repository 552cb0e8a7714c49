"""What the scheduler's benchmarks share: which prompts, runs of several settings in turn, and the head of a report."""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.cli.machine import describe_machine, installed_versions
from mirrorsd.cli.prompt_file import read_questions
from mirrorsd.runtime.engine import resolve_speculation
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.request import StepRecord

Messages = list[dict[str, str]]
PASS = ("prefix", "middle", "exit", "suffix", "read")
"""Spans of the target that make up a pass."""
FIGURES = ("tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to decode: a name for the table, the method, and values of `SpeculationConfig`."""

    name: str
    method: str = "mirror"
    speculation: dict[str, Any] = field(default_factory=dict)


def parser(description: str | None, *, count: int = 6, tokens: int = 96) -> argparse.ArgumentParser:
    """The options that all of them take."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--prompts", type=Path, default=Path("samples/storyteller/prompts.jsonl"))
    found.add_argument("--count", type=int, default=count, help="how many prompts, spread over the file")
    found.add_argument("--tokens", type=int, default=tokens, help="new tokens per text")
    found.add_argument("--output", type=Path)
    return found


def spread_prompts(path: Path, count: int, first: int = 0) -> list[Messages]:
    """`count` first turns, evenly spread over the file from question `first` on."""
    questions = read_questions(path)[first:]
    chosen = questions[:: max(len(questions) // count, 1)][:count]
    return [[{"role": "user", "content": question.turns[0]}] for question in chosen]


def decode_all(
    pipe: MirrorPipeline, settings: Sequence[Setting], prompts: Sequence[Messages], config: GenerationConfig
) -> dict[str, list[GenerationResult]]:
    """Every setting on every prompt, in turn; which comes first rotates. One untimed text each before.

    Raises:
        SystemExit: two settings gave different texts, which must never happen.
    """
    sessions = {s.name: pipe.session(resolve_speculation(pipe.speculation, s.speculation)) for s in settings}
    found: dict[str, list[GenerationResult]] = {setting.name: [] for setting in settings}
    for number, messages in enumerate([prompts[0], *prompts]):
        shift = number % len(settings)
        for setting in (*settings[shift:], *settings[:shift]):
            seeded = config.with_overrides({"method": setting.method, "seed": number})
            found[setting.name].append(sessions[setting.name].generate(messages=messages, config=seeded))
        if len({tuple(results[-1].token_ids) for results in found.values()}) > 1:
            print(
                f"note: texts differ on prompt {number} (near ties: {[r[-1].stats.near_ties for r in found.values()]})"
            )
    for session in sessions.values():
        session.close()
    return {name: results[1:] for name, results in found.items()}


def sum_up(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """One row: median speed, figures per step averaged with the steps as weights."""
    stats = [result.stats for result in results]
    steps = sum(stat.steps for stat in stats)
    row: dict[str, Any] = {"tokens_per_second": round(median(stat.tokens_per_second for stat in stats), 2)}
    for name in FIGURES:
        row[name] = round(sum(getattr(stat, name) * stat.steps for stat in stats) / steps, 4)
    sources = sorted({source for stat in stats for source in stat.reuse_by_source})
    row["reuse_by_source"] = {
        source: round(sum(stat.reuse_by_source.get(source, 0.0) * stat.steps for stat in stats) / steps, 4)
        for source in sources
    }
    row["step_ms"] = {name: round(median(stat.step_ms[name] for stat in stats), 4) for name in stats[0].step_ms}
    return row


def spans_in(result: GenerationResult, step: StepRecord) -> list[Span]:
    """What happened within a step."""
    return [span for span in result.spans if step.started <= span.start and span.end <= step.ended]


def header(bundle: Path, **values: object) -> dict[str, Any]:
    """The head of a report: bundle, machine, versions, and whatever the script adds; no paths, no host names."""
    machine = describe_machine() | {"system": f"{platform.system()} {platform.machine()}".replace("_", "-")}
    return {"bundle": bundle.name, **values, "machine": machine, "versions": installed_versions()}


def finish(report: dict[str, Any], output: Path | None) -> None:
    """Write the report, if a file is named."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a plain table."""
    for row in rows:
        cells = [row.get(column) for column in columns]
        print("  ".join(f"{cell:>9.3f}" if isinstance(cell, float) else f"{cell!s:<26}" for cell in cells), flush=True)
