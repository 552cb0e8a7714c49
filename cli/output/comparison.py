"""Measure several methods on the same questions, and sum the measurements up. Printing is `compare`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.errors import ContextLengthError

if TYPE_CHECKING:
    from mirrorsd import GenerationResult

ALL_CATEGORIES = "all"
TIMES = ("tokens_per_second", "prefill_ms", "time_to_first_token_ms")
AVERAGED = ("tokens_per_step", "mean_accepted", "draft_right", "reuse_rate", "draft_exposed_ms", "overlap")
_USELESS = 0.05
"""A window of six tokens of which so few are right brings a third of a token a pass, and costs more."""
Answer = Callable[[str, list[dict[str, str]]], "GenerationResult"]
"""Called with the method and the conversation so far (its last message is the user's); decodes the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One decoded answer."""

    question: Question
    turn: int
    method: str
    token_ids: tuple[int, ...]
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a method's answer first left the first method's."""

    question_id: int | str
    turn: int
    method: str
    reference: str
    position: int


def measure(
    questions: tuple[Question, ...],
    methods: tuple[str, ...],
    repeats: int,
    answer: Answer,
    advance: Callable[[str], None],
) -> list[Measurement]:
    """Answer every question with every method, interleaved; which method goes first rotates with the question.

    A turn that does not fit into the context ends its question, for all methods alike.

    Raises:
        ContextLengthError: no question fits.
    """
    warm_up(questions[0], methods, answer)
    measurements: list[Measurement] = []
    too_long: ContextLengthError | None = None
    for number, question in enumerate(questions * repeats):
        first = number % len(methods)
        refusals = [converse(question, method, answer, measurements) for method in (*methods[first:], *methods[:first])]
        too_long = refusals[0] or too_long
        advance(f"{question.category} {question.question_id}{f': {refusals[0]}' if refusals[0] else ''}")
    if too_long is not None and not measurements:
        raise too_long
    return measurements


def warm_up(question: Question, methods: Sequence[str], answer: Answer) -> None:
    """Let every method run once, untimed: first runs allocate and compile."""
    for method in methods:
        converse(question, method, answer, [])


def converse(
    question: Question, method: str, answer: Answer, measurements: list[Measurement]
) -> ContextLengthError | None:
    """Ask the turns of one question in order; each answer becomes part of the next turn's conversation.

    Adds to `measurements`; returns why a turn could not be asked, None where all were.
    """
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(question.turns, start=1):
        messages = [*messages, {"role": "user", "content": text}]
        try:
            result = answer(method, messages)
        except ContextLengthError as error:
            return error
        messages = [*messages, {"role": "assistant", "content": result.text}]
        token_ids, stats = tuple(result.token_ids), result.stats.to_dict()
        measurements.append(Measurement(question=question, turn=turn, method=method, token_ids=token_ids, stats=stats))
    return None


def find_differences(measurements: Iterable[Measurement]) -> list[Difference]:
    """The first difference of every (question, method), against the first answer to the same question and turn."""
    references: dict[tuple[int | str, int], Measurement] = {}
    found: dict[tuple[int | str, str], Difference] = {}
    for measurement in measurements:
        question_id = measurement.question.question_id
        reference = references.setdefault((question_id, measurement.turn), measurement)
        key = (question_id, measurement.method)
        if measurement.token_ids != reference.token_ids and key not in found:
            found[key] = Difference(
                question_id=question_id,
                turn=measurement.turn,
                method=measurement.method,
                reference=reference.method,
                position=first_difference(measurement.token_ids, reference.token_ids),
            )
    return list(found.values())


def first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Index of the first token that differs.

    >>> first_difference((5, 6, 7), (5, 6, 8)), first_difference((5, 6), (5, 6, 8))
    (2, 2)
    """
    pairs = zip_longest(ids, other_ids)
    return next(index for index, (token, other) in enumerate(pairs) if token != other)


def summarise(measurements: Sequence[Measurement], methods: Sequence[str]) -> list[dict[str, Any]]:
    """One row per method and category, then one per method for `all`, the mean of the categories."""
    categories = list(dict.fromkeys(measurement.question.category for measurement in measurements))
    by_category = [
        _category_row(
            method, category, [m for m in measurements if (m.method, m.question.category) == (method, category)]
        )
        for category in categories
        for method in methods
    ]
    overall = [_mean_row(method, [row for row in by_category if row["method"] == method]) for method in methods]
    return _with_ratios(by_category + overall)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`times_plain`: speed over plain decoding's in the same category; None where that was not measured."""
    plain = {row["category"]: row["tokens_per_second"] for row in rows if row["method"] == "plain"}
    for row in rows:
        base = plain.get(row["category"])
        row["times_plain"] = row["tokens_per_second"] / base if base else None
    return rows


def _category_row(method: str, category: str, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Times are medians over answers; figures per step are averaged with the steps as weights."""
    row: dict[str, Any] = {"method": method, "category": category}
    row |= {name: median(m.stats[name] for m in measurements) for name in TIMES}
    row["num_prompt_tokens"] = fmean(m.stats["num_prompt_tokens"] for m in measurements)
    for name in AVERAGED:
        weight = "num_drafted" if name == "draft_right" else "steps"
        pairs = [(m.stats[name], m.stats[weight]) for m in measurements if m.stats.get(name) is not None]
        num_steps = sum(steps for _, steps in pairs)
        row[name] = sum(value * steps for value, steps in pairs) / num_steps if num_steps else None
    return row


def _mean_row(method: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mean: dict[str, Any] = {"method": method, "category": ALL_CATEGORIES}
    for name in (*TIMES, "num_prompt_tokens", *AVERAGED):
        values = [row[name] for row in rows if row[name] is not None]
        mean[name] = fmean(values) if values else None
    return mean


def verdict(rows: Sequence[dict[str, Any]], *, is_identical: bool) -> str:
    """What the comparison has found, in a sentence; the fastest method speaks where `auto` was not measured."""
    overall = {row["method"]: row for row in rows if row["category"] == ALL_CATEGORIES}
    rivals = [row for method, row in overall.items() if method != "plain"]
    texts = "all texts identical" if is_identical else "the texts are NOT identical"
    row = overall.get("auto") or max(rivals, key=lambda row: float(row["tokens_per_second"]), default=None)
    if row is None or row["times_plain"] is None:
        return f"{texts[0].upper()}{texts[1:]}."
    return f"{row['method']} is {row['times_plain']:.1f} times plain here; {texts}."


def about_draft(rows: Sequence[dict[str, Any]]) -> str:
    """A plain word where the draft is no use; else nothing."""
    overall = [row for row in rows if row["category"] == ALL_CATEGORIES and row["draft_right"] is not None]
    right = max((row["draft_right"] for row in overall), default=1.0)
    if right >= _USELESS:
        return ""
    often = "never" if right == 0 else "almost never"
    return (
        f"This draft is {often} right ({right:.1%} of its tokens), so it cannot make anything faster: "
        "see `mirrorsd train draft`."
    )
