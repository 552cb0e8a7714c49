"""One report on a trained pair: what a draft and the exits are worth, task by task.

Owns: which measurements are made on which text, and the JSON's form.
Does not own: the measurements (`draft_report.py`, `miss_report.py`, `sampling_report.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.reports.draft_report import measure_agreement, measure_confirmed, measure_windows
from mirrorsd.training.reports.miss_report import measure_misses
from mirrorsd.training.reports.sampling_report import SamplingTrial, measure_sampling
from mirrorsd.training.text.self_text import SelfText

__all__ = ["SECTIONS", "TrainedPair", "check_sections", "report_pair"]

SECTIONS = ("agreement", "windows", "confirmed", "misses", "sampling")
PASSES = (1, 2, 3)
TextsByTask = Mapping[str, Sequence[SelfText]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPair:
    """A target with its exits (adapter by layer, None for an untrained one), a draft, and an `s = 0` draft if any."""

    target: PreTrainedModel
    exits: Mapping[int, nn.Module | None]
    draft: StreamingDraft
    baseline: StreamingDraft | None = None


def check_sections(sections: Sequence[str]) -> None:
    """Check that a report can have these sections.

    Raises:
        ConfigError: There is no such section.
    """
    unknown = set(sections) - set(SECTIONS)
    if unknown:
        raise ConfigError(f"there is no section {min(unknown)!r}; allowed are {', '.join(SECTIONS)}")


def report_pair(
    pair: TrainedPair,
    greedy: TextsByTask,
    sampled: Sequence[SelfText],
    *,
    sections: Sequence[str] = SECTIONS,
    gamma: int = 6,
    show: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Measure a pair.

    Args:
        pair: What is measured.
        greedy: What the target wrote greedily, by task.
        sampled: What the target wrote at temperature 1; only for `sampling`.
        sections: Which of `SECTIONS`.
        gamma: Longest window.
        show: Told about each section that is done.

    Raises:
        ConfigError: There is no such section.
    """
    check_sections(sections)
    texts = [text for task in greedy.values() for text in task]
    makers: dict[str, Callable[[], Any]] = {
        "agreement": lambda: measure_agreement(pair.draft, texts),
        "windows": lambda: _windows(pair, greedy, gamma),
        "confirmed": lambda: measure_confirmed(pair.draft, texts),
        "misses": lambda: measure_misses(pair.target, pair.exits, pair.draft, texts),
        "sampling": lambda: measure_sampling(pair.target, pair.draft, sampled, SamplingTrial(gamma=gamma)),
    }
    report: dict[str, Any] = {"texts": {task: len(found) for task, found in greedy.items()}, "gamma": gamma}
    for section in (name for name in SECTIONS if name in sections):
        report[section] = makers[section]()
        show(section)
    return report


def _windows(pair: TrainedPair, greedy: TextsByTask, gamma: int) -> dict[str, Any]:
    """Return window statistics by way of drafting and task, `all` being the mean of the tasks."""
    ways: dict[str, tuple[StreamingDraft, int]] = {f"J={passes}": (pair.draft, passes) for passes in PASSES}
    ways[f"main rows alone, {gamma} passes"] = (pair.draft, gamma)
    if pair.baseline is not None:
        ways[f"s=0, {gamma} passes"] = (pair.baseline, gamma)
    found: dict[str, Any] = {}
    for way, (draft, passes) in ways.items():
        by_task = {
            task: measure_windows(draft, texts, passes=passes, gamma=gamma).summary() for task, texts in greedy.items()
        }
        mean = sum(row["mean_accepted"] for row in by_task.values()) / max(len(by_task), 1)
        found[way] = {"mean_accepted": round(mean, 3), "by_task": by_task}
    reference = found[list(ways)[-1]]["mean_accepted"]
    for way in list(ways)[: len(PASSES)]:
        found[way]["share_of_reference"] = round(found[way]["mean_accepted"] / reference, 4) if reference else None
    return {"reference": list(ways)[-1], **found}
