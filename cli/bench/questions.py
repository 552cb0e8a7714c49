"""Which questions are asked: tasks, a few of each by a fixed hash. Reading the file is `prompt_file`'s."""

import hashlib
from collections.abc import Sequence

from mirrorsd.cli.input.prompt_file import Question

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench has ten questions of each, and counts them as one task."""


def task_of(question_id: int | str, category: str) -> str:
    """The task that a question counts for: its category, but Spec-Bench's eight of MT-Bench are one.

    Spec-Bench numbers its questions. SPEED-Bench, whose ids are words, has tasks of the same names.

    >>> task_of(81, "writing"), task_of(81, "rag"), task_of("5f0c", "writing")
    ('mt_bench', 'rag', 'writing')
    """
    return "mt_bench" if isinstance(question_id, int) and category in MT_BENCH else category


def choose(questions: Sequence[Question], per_task: int | None) -> tuple[Question, ...]:
    """`per_task` questions of every task, the same ones wherever they stand in the file; all without a number."""
    if per_task is None:
        return tuple(questions)
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(task_of(question.question_id, question.category), []).append(question)
    kept = {q.question_id for found in by_task.values() for q in sorted(found, key=_place)[:per_task]}
    return tuple(question for question in questions if question.question_id in kept)


def _place(question: Question) -> str:
    return hashlib.sha256(str(question.question_id).encode()).hexdigest()
