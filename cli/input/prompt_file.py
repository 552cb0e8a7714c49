"""Prompt files in Spec-Bench's form: one JSON object per line with `question_id`, `category` and `turns`.

SPEED-Bench's lines have the same names; their ids are words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mirrorsd.graphs.documents import DocumentError, build, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError

Item = TypeVar("Item")
_UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn of SPEED-Bench begins whose text is not in its published files."""
_FORM = 'expected {"question_id": ..., "category": "...", "turns": ["...", ...]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt of one or more user turns."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the file; other fields, such as reference answers, are left out."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


BUILT_IN_QUESTIONS = tuple(
    Question(question_id=f"{category}-{number}", category=category, turns=turns)
    for category, number, turns in (
        ("story", 1, ("Tell me a story about a little fox.",)),
        ("story", 2, ("Tell me a story about an old king and his three sons.",)),
        ("question", 1, ("What do bees make?",)),
        ("dialogue", 1, ("Good morning! How are you today?", "What will you do this evening?")),
    )
)
"""What `compare` uses when no file is named."""


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` items, evenly spread over all of them; all, where there are no more.

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a prompt file; blank lines are skipped.

    Raises:
        ConfigError: no such file, not UTF-8, no questions, or a line of another form (named by its number), with the
            id of an earlier one, or without its text, as SPEED-Bench publishes some.
    """
    try:
        lines = read_text(path).split("\n")
    except DocumentError as error:
        raise ConfigError(f"{path} {error}.") from error
    questions: dict[int | str, Question] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _read_line(line, f"{path}, line {number}")
        if found.question_id in questions:
            raise ConfigError(
                f"{path}, line {number} has the question_id {found.question_id!r} of an earlier line; answers are told "
                "apart by it: give every question an id of its own."
            )
        questions[found.question_id] = found
    if not questions:
        raise ConfigError(f"{path} has no questions; {_FORM} on each line.")
    return tuple(questions.values())


def _read_line(line: str, where: str) -> Question:
    try:
        found = build(_Line, parse_json(line), allows_unknown=True)
    except DocumentError as error:
        raise ConfigError(f"{where} {error}; {_FORM}.") from error
    if not found.category or not found.turns or not all(found.turns):
        raise ConfigError(f"{where} has an empty category, no turns, or an empty one; {_FORM}.")
    if any(turn.startswith(_UNRESOLVED) for turn in found.turns):
        raise ConfigError(
            f"{where} has no text: SPEED-Bench leaves it to its own preparation script to fetch it; run that script, "
            "and give the file it writes, as JSON lines."
        )
    return Question(question_id=found.question_id, category=found.category, turns=found.turns)
