"""From answer lines to figures: the board's way, decoding alone, and the text before it repeats itself.

Owns: the arithmetic, and whether the texts are the same. Does not own: showing it (`report`, the command).

A question's speed is its new tokens over its time, all turns together; a method's is the mean of its questions', and
a speed-up is the ratio of two such means, as Spec-Bench's board has it. Several runs of a question count as their mean.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd.cli.bench.answers import Line
from mirrorsd.cli.bench.intervals import widened
from mirrorsd.cli.bench.questions import task_of
from mirrorsd.cli.bench.running import REFERENCE
from mirrorsd.cli.output.comparison import first_difference

ALL_TASKS = "all"
_RESAMPLES = 10_000
_LOOP_LENGTH, _LOOP_TIMES = 8, 3
_LEAST_WINDOWS = 10
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


def board_speed(line: Line) -> float:
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


def speed_before_loops(line: Line, starts: Sequence[int]) -> float | None:
    """As `decode_speed`, of the steps up to where each turn begins to repeat itself (`starts`).

    A turn of 6 tokens in steps of 2 that ended after 1, 2 and 3 s, of which the first 3 are no loop, has 4 in 2 s.
    """
    choice = line["choices"][0]
    if None in choice["prefill_s"] or not all(choice["step_ends_s"]):
        return None
    num_tokens, seconds, lengths = 0, 0.0, iter(choice["accept_lengths"])
    for start, ends, prefill in zip(starts, choice["step_ends_s"], choice["prefill_s"], strict=True):
        counts = list(accumulate(next(lengths) for _ in ends))
        step = bisect_left(counts, start)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """The figures of one answer line, computed once: its speeds by name, and in how many of its turns it loops."""

    question_id: int | str
    task: str
    choice: dict[str, Any]
    speeds: dict[str, float | None]
    loops: list[bool]


_Measured = Mapping[str, Sequence[Sequence[_Question]]]
"""By entrant, the questions of each run."""


def _measure(runs: Runs) -> dict[str, list[list[_Question]]]:
    return {name: [[_question(line) for line in lines] for lines in of_runs] for name, of_runs in runs.items()}


def _question(line: Line) -> _Question:
    choice = line["choices"][0]
    starts = [loop_start(tokens) for tokens in choice["tokens"]]
    before_loops = speed_before_loops(line, starts)
    speeds = {"": board_speed(line), "decode_": decode_speed(line), "before_loops_": before_loops}
    loops = [start < len(tokens) for start, tokens in zip(starts, choice["tokens"], strict=True)]
    task = task_of(line["question_id"], line["category"])
    return _Question(question_id=line["question_id"], task=task, choice=choice, speeds=speeds, loops=loops)


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """A row per task and entrant, then one per entrant for all questions."""
    measured = _measure(runs)
    tasks = dict.fromkeys(found.task for of_runs in measured.values() for found in chain(*of_runs))
    return [_row(measured, name, task) for task in (*tasks, ALL_TASKS) for name in runs]


def _row(measured: _Measured, name: str, task: str) -> dict[str, Any]:
    own, plain = _of_task(measured[name], task), _of_task(measured.get(REFERENCE, ()), task)
    every = list(chain(*own))
    choices = [found.choice for found in every]
    means = [fmean(_speeds([run], "").values()) for run in own if run]
    sources = Counter[str]()
    for of_turn in chain(*(choice["sources"] for choice in choices)):
        sources.update(of_turn)
    steps = list(chain(*(choice["accept_lengths"] for choice in choices)))
    firsts = [seconds for seconds in chain(*(choice["ttft_s"] for choice in choices)) if seconds is not None]
    loops = list(chain(*(found.loops for found in every)))
    return {
        "task": task,
        "method": name,
        "questions": len({found.question_id for found in every}),
        "runs": len(own),
        **_compared("", own, plain),
        "deviation_of_runs": stdev(means) if len(means) > 1 else None,
        **_compared("decode_", own, plain),
        **_compared("before_loops_", own, plain),
        "turns_with_loops": fmean(loops) if loops else None,
        "ttft_ms": 1e3 * median(firsts) if firsts else None,
        "tokens_per_step": fmean(steps) if steps else None,
        "reuse_by_source": {source: count / sources.total() for source, count in sorted(sources.items())},
        "accepted_at": accepted_at(choices),
    }


def _of_task(of_runs: Sequence[Sequence[_Question]], task: str) -> list[list[_Question]]:
    return [[found for found in run if task in (ALL_TASKS, found.task)] for run in of_runs]


def _compared(speed: str, own: list[list[_Question]], plain: list[list[_Question]]) -> dict[str, Any]:
    """Mean speed, and over plain decoding's with a 95 % interval; None where it is not known."""
    ours, others = _speeds(own, speed), _speeds(plain, speed)
    shared = [name for name in ours if name in others]
    found = {f"{speed}tokens_per_second": fmean(ours.values()) if ours else None}
    if not shared:
        return found | {f"{speed}over_plain": None, f"{speed}interval": None}
    pairs = np.array([(ours[name], others[name]) for name in shared])
    ratio = float(pairs[:, 0].mean() / pairs[:, 1].mean())
    return found | {f"{speed}over_plain": ratio, f"{speed}interval": bootstrap(pairs)}


def _speeds(of_runs: Sequence[Sequence[_Question]], speed: str) -> dict[int | str, float]:
    return by_question((found.question_id, found.speeds[speed]) for found in chain(*of_runs))


def by_question(speeds: Iterable[tuple[int | str, float | None]]) -> dict[int | str, float]:
    """The mean of every question's speeds, of those that are known."""
    found: dict[int | str, list[float]] = {}
    for question_id, value in speeds:
        if value is not None:
            found.setdefault(question_id, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def bootstrap(pairs: NDArray[np.float64]) -> list[float] | None:
    """The 95 % interval of the ratio of two means, `pairs` `[questions, 2]` drawn again with their partners, widened.

    None for fewer than two questions, which say nothing about others.
    """
    if len(pairs) < 2:
        return None
    random = np.random.default_rng(0)
    drawn = random.integers(len(pairs), size=(_RESAMPLES, len(pairs)), dtype=np.int32)
    ours, others = (column[drawn].sum(axis=1) for column in pairs.T.copy())
    low, high = np.percentile(ours / others, (2.5, 97.5))
    ratio = pairs[:, 0].sum() / pairs[:, 1].sum()
    return [float(end) for end in widened(low, ratio, high, [len(pairs)])]


def accepted_at(choices: Iterable[Mapping[str, Any]], least: int = _LEAST_WINDOWS) -> list[float]:
    """Of the windows with a first, second, ... token, the share in which that one and all before it were accepted.

    The last step of a turn is left out: the text may have ended within its window. So are places that fewer than
    `least` windows have.

    >>> accepted_at([{"accept_lengths": [3, 1, 2], "window_lengths": [[2, 2, 2]]}], least=2)
    [0.5, 0.5]
    """
    steps = Counter[tuple[int, int]]()
    for choice in choices:
        lengths = iter(choice["accept_lengths"])
        for windows in choice["window_lengths"]:
            steps.update(list(zip(windows, islice(lengths, len(windows)), strict=True))[:-1])
    offered, right = Counter[int](), Counter[int]()
    for (window, length), count in steps.items():
        offered.update(dict.fromkeys(range(1, window + 1), count))
        right.update(dict.fromkeys(range(1, length), count))
    return [right[place] / offered[place] for place in sorted(offered) if offered[place] >= least]


def points(runs: Runs) -> list[dict[str, Any]]:
    """A point per question and entrant: its speed over plain decoding's, and its tokens per step."""
    speeds = {
        name: by_question((line["question_id"], board_speed(line)) for line in chain(*of_runs))
        for name, of_runs in runs.items()
    }
    plain = speeds.get(REFERENCE, {})
    found = []
    for name, of_runs in runs.items():
        for line in of_runs[0] if of_runs else ():
            question_id, lengths = line["question_id"], line["choices"][0]["accept_lengths"]
            point = {"question_id": question_id, "task": task_of(question_id, line["category"]), "method": name}
            base = plain.get(question_id)
            point["over_plain"] = speeds[name][question_id] / base if base else None
            point["tokens_per_step"] = fmean(lengths) if lengths else None
            found.append(point)
    return found


def find_differences(runs: Runs, names: Sequence[str], *, with_ends: bool = True) -> list[Difference]:
    """Where the answers of these entrants leave plain decoding's, or the first one's where that was not measured.

    Without ends, the token that ended a text is not compared: other runtimes do not say which one it was.
    """
    reference = REFERENCE if REFERENCE in names else names[0]
    found = []
    for name in names:
        for run, (lines, others) in enumerate(zip(runs[name], runs[reference], strict=True), start=1):
            texts = {line["question_id"]: _tokens(line, with_ends) for line in others}
            for line in lines:
                where = _first_difference(_tokens(line, with_ends), texts.get(line["question_id"], []))
                if where is not None:
                    place = {"question_id": line["question_id"], "run": run, "turn": where[0], "position": where[1]}
                    found.append(Difference(method=name, reference=reference, **place))
    return found


def _tokens(line: Line, with_ends: bool) -> list[list[int]]:
    choice = line["choices"][0]
    turns: list[list[int]] = choice["tokens"]
    if with_ends:
        return turns
    reasons = choice.get("finish_reason", [""] * len(turns))
    return [ids[:-1] if reason == "eos" else ids for ids, reason in zip(turns, reasons, strict=True)]


def _first_difference(turns: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Turn (from 1) and token (from 0) of the first difference between two conversations."""
    for turn, (ids, other) in enumerate(zip(turns, others, strict=False), start=1):
        if ids != other:
            return turn, first_difference(ids, other)
    return None
