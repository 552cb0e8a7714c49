"""Prompt files in Spec-Bench's form: one JSON object per line with `question_id`, `category` and `turns`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mirrorsd.graphs.errors import ConfigError

Item = TypeVar("Item")
_FORM = 'expected {"question_id": ..., "category": "...", "turns": ["...", ...]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt of one or more user turns."""

    question_id: str
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
        ConfigError: no such file, not UTF-8, no questions, or a line of another form (named by its number).
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    questions = tuple(
        _read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()
    )
    if not questions:
        raise ConfigError(f"{path} has no questions; {_FORM} on each line.")
    return questions


def _read_line(line: str, where: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg} at column {error.colno}); {_FORM}.") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not an object; {_FORM}.")
    for key in ("question_id", "category", "turns"):
        if key not in record:
            raise ConfigError(f"{where} has no {key!r}; {_FORM}.")
    category, turns = record["category"], record["turns"]
    if not isinstance(category, str) or not category:
        raise ConfigError(f"{where}: 'category' is {category!r}; {_FORM}.")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{where}: 'turns' must be a list of texts, at least one and none empty; {_FORM}.")
    return Question(question_id=str(record["question_id"]), category=category, turns=tuple(turns))
