"""From answer lines to figures: the board's way, decoding alone, and the text before it repeats itself.

Owns: the arithmetic, and whether the texts are the same. Does not own: showing it (`report`, the command).

A question's speed is its new tokens over its time, all turns together; a method's is the mean of its questions', and
a speed-up is the ratio of two such means, as Spec-Bench's board has it. Several runs of a question count as their mean.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd.cli.bench.answers import Line
from mirrorsd.cli.bench.questions import task_of
from mirrorsd.cli.bench.running import REFERENCE
from mirrorsd.cli.output.comparison import first_difference

ALL_TASKS = "all"
_RESAMPLES = 10_000
_LOOP_LENGTH, _LOOP_TIMES = 8, 3
_LEAST_WINDOWS = 10
Speed = Callable[[Line], float | None]
Runs = Mapping[str, Sequence[Sequence[Line]]]
"""Answer lines by entrant: one sequence of them per run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an answer first left the reference's."""

    question_id: int | str
    run: int
    turn: int
    method: str
    reference: str
    position: int


def board_speed(line: Line) -> float | None:
    """Tokens per second of a question, prompts included.

    >>> board_speed({"choices": [{"new_tokens": [30, 10], "wall_time": [2.0, 2.0]}]})
    10.0
    """
    choice = line["choices"][0]
    return float(sum(choice["new_tokens"]) / sum(choice["wall_time"]))


def decode_speed(line: Line) -> float | None:
    """Tokens per second from the end of the prompt on; None where nobody knows when that was.

    >>> decode_speed({"choices": [{"new_tokens": [30, 10], "wall_time": [2.0, 2.0], "prefill_s": [0.5, 1.5]}]})
    20.0
    """
    choice = line["choices"][0]
    if None in choice["prefill_s"]:
        return None
    return float(sum(choice["new_tokens"]) / (sum(choice["wall_time"]) - sum(choice["prefill_s"])))


def speed_before_loops(line: Line) -> float | None:
    """As `decode_speed`, of the steps up to where each turn begins to repeat itself.

    A turn of 6 tokens in steps of 2 that ended after 1, 2 and 3 s, of which the first 3 are no loop, has 4 in 2 s.
    """
    choice = line["choices"][0]
    if None in choice["prefill_s"] or not all(choice["step_ends_s"]):
        return None
    num_tokens, seconds, lengths = 0, 0.0, iter(choice["accept_lengths"])
    for tokens, ends, prefill in zip(choice["tokens"], choice["step_ends_s"], choice["prefill_s"], strict=True):
        counts = list(accumulate(next(lengths) for _ in ends))
        step = next(place for place, count in enumerate(counts) if count >= loop_start(tokens))
        num_tokens, seconds = num_tokens + counts[step], seconds + ends[step] - prefill
    return num_tokens / seconds


def loop_start(tokens: Sequence[int], length: int = _LOOP_LENGTH, times: int = _LOOP_TIMES) -> int:
    """Where a text begins to repeat itself: at the second of the places that `length` tokens in a row have, of `times`.

    Without such tokens it is the text's end.

    >>> loop_start([9, 1, 2, 1, 2, 1, 2], length=2), loop_start([9, 1, 2, 1, 2], length=2)
    (3, 5)
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(tokens) - length + 1):
        found = places.setdefault(tuple(tokens[place : place + length]), [])
        found.append(place)
        if len(found) == times:
            return found[1]
    return len(tokens)


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """A row per task and entrant, then one per entrant for all questions."""
    lines = [line for of_runs in runs.values() for lines in of_runs for line in lines]
    tasks = list(dict.fromkeys(task_of(line["question_id"], line["category"]) for line in lines))
    return [_row(runs, name, task) for task in (*tasks, ALL_TASKS) for name in runs]


def _row(runs: Runs, name: str, task: str) -> dict[str, Any]:
    own, plain = _of_task(runs[name], task), _of_task(runs.get(REFERENCE, ()), task)
    every = [line for lines in own for line in lines]
    choices = [line["choices"][0] for line in every]
    means = [fmean(_known(board_speed, lines)) for lines in own if lines]
    sources = Counter[str]()
    for choice in choices:
        for found in choice["sources"]:
            sources.update(found)
    steps = [length for choice in choices for length in choice["accept_lengths"]]
    firsts = [seconds for choice in choices for seconds in choice["ttft_s"] if seconds is not None]
    loops = [loop_start(tokens) < len(tokens) for choice in choices for tokens in choice["tokens"]]
    return {
        "task": task,
        "method": name,
        "questions": len({line["question_id"] for line in every}),
        "runs": len(own),
        **_compared("", board_speed, own, plain),
        "deviation_of_runs": stdev(means) if len(means) > 1 else None,
        **_compared("decode_", decode_speed, own, plain),
        **_compared("before_loops_", speed_before_loops, own, plain),
        "turns_with_loops": fmean(loops) if loops else None,
        "ttft_ms": 1e3 * median(firsts) if firsts else None,
        "tokens_per_step": fmean(steps) if steps else None,
        "reuse_by_source": {source: count / sources.total() for source, count in sorted(sources.items())},
        "accepted_at": accepted_at(choices),
    }


def _of_task(of_runs: Sequence[Sequence[Line]], task: str) -> list[list[Line]]:
    return [
        [line for line in lines if task in (ALL_TASKS, task_of(line["question_id"], line["category"]))]
        for lines in of_runs
    ]


def _known(speed: Speed, lines: Iterable[Line]) -> list[float]:
    return [found for found in map(speed, lines) if found is not None]


def _compared(prefix: str, speed: Speed, own: list[list[Line]], plain: list[list[Line]]) -> dict[str, Any]:
    """Mean speed, and over plain decoding's with a 95 % interval; None where it is not known."""
    ours, others = by_question(own, speed), by_question(plain, speed)
    shared = [name for name in ours if name in others]
    found = {f"{prefix}tokens_per_second": fmean(ours.values()) if ours else None}
    if not shared:
        return found | {f"{prefix}over_plain": None, f"{prefix}interval": None}
    pairs = np.array([(ours[name], others[name]) for name in shared])
    ratio = float(pairs[:, 0].mean() / pairs[:, 1].mean())
    return found | {f"{prefix}over_plain": ratio, f"{prefix}interval": bootstrap(pairs)}


def by_question(of_runs: Iterable[Iterable[Line]], speed: Speed) -> dict[int | str, float]:
    """The mean of every question's speeds."""
    found: dict[int | str, list[float]] = {}
    for lines in of_runs:
        for line in lines:
            value = speed(line)
            if value is not None:
                found.setdefault(line["question_id"], []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def bootstrap(pairs: NDArray[np.float64]) -> list[float] | None:
    """The 95 % interval of the ratio of two means, `pairs` `[questions, 2]` drawn again with their partners.

    None for fewer than two questions, which say nothing about others.
    """
    if len(pairs) < 2:
        return None
    random = np.random.default_rng(0)
    times_drawn = random.multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=_RESAMPLES)
    drawn = times_drawn @ pairs
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return [float(low), float(high)]


def accepted_at(choices: Iterable[Mapping[str, Any]], least: int = _LEAST_WINDOWS) -> list[float]:
    """Of the windows with a first, second, ... token, the share in which that one and all before it were accepted.

    The last step of a turn is left out: the text may have ended within its window. So are places that fewer than
    `least` windows have.

    >>> accepted_at([{"accept_lengths": [3, 1, 2], "window_lengths": [[2, 2, 2]]}], least=2)
    [0.5, 0.5]
    """
    offered, right = Counter[int](), Counter[int]()
    for choice in choices:
        lengths = iter(choice["accept_lengths"])
        for windows in choice["window_lengths"]:
            steps = list(zip(windows, [next(lengths) for _ in windows], strict=True))[:-1]
            for window, length in steps:
                offered.update(range(1, window + 1))
                right.update(range(1, length))
    return [right[place] / offered[place] for place in sorted(offered) if offered[place] >= least]


def points(runs: Runs) -> list[dict[str, Any]]:
    """A point per question and entrant: its speed over plain decoding's, and its tokens per step."""
    plain = by_question(runs.get(REFERENCE, ()), board_speed)
    found = []
    for name, of_runs in runs.items():
        speeds = by_question(of_runs, board_speed)
        for line in of_runs[0] if of_runs else ():
            question_id, lengths = line["question_id"], line["choices"][0]["accept_lengths"]
            point = {"question_id": question_id, "task": task_of(question_id, line["category"]), "method": name}
            base = plain.get(question_id)
            point["over_plain"] = speeds[question_id] / base if base else None
            point["tokens_per_step"] = fmean(lengths) if lengths else None
            found.append(point)
    return found


def find_differences(runs: Runs, names: Sequence[str]) -> list[Difference]:
    """Where the answers of these entrants leave plain decoding's, or the first one's where that was not measured."""
    reference = REFERENCE if REFERENCE in names else names[0]
    found = []
    for name in names:
        for run, (lines, others) in enumerate(zip(runs[name], runs[reference], strict=True), start=1):
            texts = {line["question_id"]: line["choices"][0]["tokens"] for line in others}
            for line in lines:
                where = _first_difference(line["choices"][0]["tokens"], texts.get(line["question_id"], []))
                if where is not None:
                    place = {"question_id": line["question_id"], "run": run, "turn": where[0], "position": where[1]}
                    found.append(Difference(method=name, reference=reference, **place))
    return found


def _first_difference(turns: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Turn (from 1) and token (from 0) of the first difference between two conversations."""
    for turn, (ids, other) in enumerate(zip(turns, others, strict=False), start=1):
        if ids != other:
            return turn, first_difference(ids, other)
    return None
