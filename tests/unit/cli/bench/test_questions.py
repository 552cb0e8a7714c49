"""Which questions are asked."""

from mirrorsd.cli.bench.questions import choose, task_of
from mirrorsd.cli.input.prompt_file import Question


def question(question_id: int | str, category: str) -> Question:
    return Question(question_id=question_id, category=category, turns=("x",))


def test_the_eight_categories_of_mt_bench_are_one_task_of_spec_bench_alone() -> None:
    assert {task_of(81, category) for category in ("writing", "math", "humanities")} == {"mt_bench"}
    assert task_of(81, "math_reasoning") == "math_reasoning"
    assert task_of("a1b2", "math") == "math"


def test_a_limit_takes_the_same_questions_of_every_task_wherever_they_stand() -> None:
    questions = [question(number, "ab"[number % 2]) for number in range(20)]
    chosen = {found.question_id for found in choose(questions, 3)}
    assert chosen == {found.question_id for found in choose(questions[::-1], 3)}
    assert [sum(number % 2 == kind for number in chosen) for kind in (0, 1)] == [3, 3]
    assert chosen != set(range(6)), "the first ones are no sample"
    assert [found.question_id for found in choose(questions, 3)] == sorted(chosen)
    assert len(choose(questions, None)) == 20


def test_a_limit_is_of_the_task_not_of_the_category() -> None:
    questions = [question(81, "writing"), question(91, "roleplay"), question(200, "rag")]
    assert [found.category for found in choose(questions, 1)][-1] == "rag"
    assert len(choose(questions, 1)) == 2
