"""What the comparison with other runtimes reports: a row per contestant, the best of every runtime, the table."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Protocol


class Answered(Protocol):
    """A contestant that is done: what it answered, by prompt."""

    name: str
    runtime: str
    answers: dict[str, list[dict[str, Any]]]


def row(
    contestant: Answered, first: Answered, tasks: dict[str, str], earlier: dict[str, list[float]]
) -> dict[str, Any]:
    """Speed: the mean of the tasks. Texts: against the first contestant's.

    Args:
        contestant: whose row it is.
        first: whose texts are the reference.
        tasks: the task of every prompt.
        earlier: seconds by prompt, of a report that this one continues.
    """
    answers = contestant.answers
    seconds = {
        name: [*earlier.get(name, []), *(round(answer["seconds"], 4) for answer in found)]
        for name, found in answers.items()
    }
    num_tokens = {name: int(found[0]["num_tokens"]) for name, found in answers.items()}
    by_task = {}
    for task in dict.fromkeys(tasks.values()):
        names = [name for name in answers if tasks[name] == task]
        by_task[task] = sum(num_tokens[name] for name in names) / sum(median(seconds[name]) for name in names)
    every = [answer for found in answers.values() for answer in found]
    passes = [answer["passes"] for answer in every]
    texts = [(found[0]["ids"], first.answers[name][0]["ids"]) for name, found in answers.items()]
    return {
        "name": contestant.name,
        "runtime": contestant.runtime,
        "tokens_per_second": round(fmean(by_task.values()), 2),
        "by_task": {task: round(speed, 2) for task, speed in by_task.items()},
        "tokens_per_pass": None if None in passes else round(sum(a["num_tokens"] for a in every) / sum(passes), 3),
        "same_text": sum(ids == others for ids, others in texts),
        "first_difference_at": [shared_start(ids, others) for ids, others in texts if ids != others],
        "num_tokens": num_tokens,
        "seconds": seconds,
    }


def best_of_each(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest way of every runtime, and what our `auto` has over it."""
    ours = max((row["tokens_per_second"] for row in rows if row["name"] == "mirrorsd auto"), default=None)
    found = {}
    for runtime in dict.fromkeys(row["runtime"] for row in rows):
        best = max((row for row in rows if row["runtime"] == runtime), key=lambda row: row["tokens_per_second"])
        found[runtime] = {"name": best["name"], "tokens_per_second": best["tokens_per_second"]}
        found[runtime]["auto_to_it"] = None if ours is None else round(ours / best["tokens_per_second"], 3)
    return found


def shared_start(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens are equal.

    >>> shared_start([5, 6, 7], [5, 6, 8])
    2
    """
    pairs = enumerate(zip(ids, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(ids), len(others)))


def print_table(report: dict[str, Any]) -> None:
    """One line per contestant, then the best of every runtime."""
    num_prompts = len(report["prompts"])
    print(
        f"{report['precision']}: {num_prompts} prompts, up to {report['tokens']} tokens, {report['threads']} threads, "
        f"end of text {report['ends']}, {report['too_long']} questions too long for the bundle"
    )
    print(f"{'':36s}{'tokens/s':>10s}{'per pass':>10s}  texts equal to the first one's")
    for found in report["rows"]:
        per_pass = "-" if found["tokens_per_pass"] is None else f"{found['tokens_per_pass']:.2f}"
        print(
            f"{found['name']:36s}{found['tokens_per_second']:10.1f}{per_pass:>10s}  "
            f"{found['same_text']} of {num_prompts} {found['first_difference_at'] or ''}"
        )
    for runtime, best in report["best"].items():
        print(
            f"best of {runtime}: {best['name'].removeprefix(runtime).strip()}, {best['tokens_per_second']:.1f} tokens/s"
        )
    print(f"turns in which other processes used the cores: {report['disturbed']}")
