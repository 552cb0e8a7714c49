"""What the comparison with other runtimes reports: a row per contestant, the best of every runtime, the table."""

import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from mirrorsd.cli.bench.intervals import widened

OWN = "mirrorsd"
_NUM_DRAWN = 2_000


class Done(NamedTuple):
    """A contestant that is done: what it answered, by prompt."""

    name: str
    runtime: str
    answers: dict[str, list[dict[str, Any]]]


def row(contestant: Done, first: Done, tasks: dict[str, str]) -> dict[str, Any]:
    """Speed: the mean of the tasks. Texts: against the first contestant's.

    Args:
        contestant: whose row it is.
        first: whose texts are the reference.
        tasks: the task of every prompt.
    """
    answers = contestant.answers
    by_task = speeds(contestant, [*answers], tasks)
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
        "num_tokens": {name: int(found[0]["num_tokens"]) for name, found in answers.items()},
        "seconds": {name: [round(answer["seconds"], 4) for answer in found] for name, found in answers.items()},
    }


def speeds(contestant: Done, prompts: Sequence[str], tasks: dict[str, str]) -> dict[str, float]:
    """Tokens per second by task: of its texts, over their time (the median over repeats)."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name in prompts:
        found = contestant.answers[name]
        task = tasks[name]
        tokens[task] = tokens.get(task, 0) + int(found[0]["num_tokens"])
        seconds[task] = seconds.get(task, 0.0) + median(answer["seconds"] for answer in found)
    return {task: tokens[task] / seconds[task] for task in tokens}


def best_of_each(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest way of every runtime, and what our `auto` has over it."""
    ours = max((row["tokens_per_second"] for row in rows if row["name"] == f"{OWN} auto"), default=None)
    found = {}
    for runtime in dict.fromkeys(row["runtime"] for row in rows):
        best = max((row for row in rows if row["runtime"] == runtime), key=lambda row: row["tokens_per_second"])
        found[runtime] = {"name": best["name"], "tokens_per_second": best["tokens_per_second"]}
        found[runtime]["auto_to_it"] = None if ours is None else round(ours / best["tokens_per_second"], 3)
    return found


def over_peers(done: Sequence[Done], rows: Sequence[dict[str, Any]], tasks: dict[str, str]) -> dict[str, Any]:
    """Our `auto` over the fastest way of each peer, in all and by task; "best peer" is the fastest of them all.

    By task, each peer decodes in the way that is its best for that task. Intervals hold in some 95 of 100 cases: texts
    are drawn again, of each task as many as there are, and what comes out is widened as so few ask for.
    """
    auto = next((one for one in done if one.name == f"{OWN} auto"), None)
    peers = [one for one in done if one.runtime != OWN]
    if auto is None or not peers:
        return {}
    speed = {row["name"]: row for row in rows}
    fastest = {
        runtime: max((one for one in peers if one.runtime == runtime), key=lambda o: speed[o.name]["tokens_per_second"])
        for runtime in dict.fromkeys(one.runtime for one in peers)
    }
    best = max(fastest.values(), key=lambda one: speed[one.name]["tokens_per_second"])
    found = {name: ratio(auto, one, tasks) for name, one in {**fastest, "best peer": best}.items()}
    for task in dict.fromkeys(tasks.values()):
        of_task = {name: known for name, known in tasks.items() if known == task}
        best = max(peers, key=lambda one: speed[one.name]["by_task"][task])
        found[f"best peer, {task}"] = ratio(auto, best, of_task)
    return found


def ratio(own: Done, other: Done, tasks: dict[str, str]) -> dict[str, Any]:
    """The mean of the tasks' speeds over another's, with its interval."""
    drawn = random.Random(0)
    by_task: dict[str, list[str]] = {}
    for name, task in tasks.items():
        by_task.setdefault(task, []).append(name)

    def of(prompts: Sequence[str]) -> float:
        ours, theirs = (fmean(speeds(one, prompts, tasks).values()) for one in (own, other))
        return ours / theirs

    draws = (
        [name for found in by_task.values() for name in drawn.choices(found, k=len(found))] for _ in range(_NUM_DRAWN)
    )
    found = sorted(of(prompts) for prompts in draws)
    low, high = (found[int(share * _NUM_DRAWN)] for share in (0.025, 0.975))
    middle = of([*tasks])
    ends = widened(low, middle, high, [len(names) for names in by_task.values()])
    return {"name": other.name, "ratio": round(middle, 3), "interval": [round(end, 3) for end in ends]}


def shared_start(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens are equal.

    >>> shared_start([5, 6, 7], [5, 6, 8])
    2
    """
    pairs = enumerate(zip(ids, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(ids), len(others)))


def print_table(report: dict[str, Any]) -> None:
    """One line per contestant, then what our `auto` has over the peers, and what each model keeps."""
    num_prompts = len(report["answered"])
    print(
        f"{report['precision']}: {num_prompts} prompts, up to {report['tokens']} tokens, {report['threads']} threads, "
        f"T = {report['temperature']:g}, end of text {report['ends']}, {report['too_long']} questions too long for the "
        f"bundle; {report['processor']}"
    )
    tasks = [*report["rows"][0]["by_task"]]
    print(f"{'':36s}{'tokens/s':>10s}{'per pass':>10s}" + "".join(f"{task[:10]:>11s}" for task in tasks) + "  same")
    for found in report["rows"]:
        per_pass = "-" if found["tokens_per_pass"] is None else f"{found['tokens_per_pass']:.2f}"
        print(
            f"{found['name']:36s}{found['tokens_per_second']:10.1f}{per_pass:>10s}"
            + "".join(f"{found['by_task'][task]:11.1f}" for task in tasks)
            + f"  {found['same_text']} of {num_prompts}"
        )
    for name, found in report["over"].items():
        low, high = found["interval"]
        print(f"auto over {name}: {found['ratio']:.3f} ({low:.3f} to {high:.3f}), {found['name']}")
    for name, found in report["quality"].items():
        print(f"{name} keeps {found['kept']:.1%} of the best tokens, perplexity {found['perplexity']:+.1%}")
    for name, why in report["refused"].items():
        print(f"{name} took no part: {why.splitlines()[0]}")
    print(f"turns in which other processes used the cores: {report['disturbed']}")
