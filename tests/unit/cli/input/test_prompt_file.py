"""Spec-Bench prompt files, good and bad."""

from pathlib import Path

import pytest

from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, Question, read_questions
from mirrorsd.graphs.errors import ConfigError


def test_reads_questions_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "extra": 1}\n\n'
        '{"question_id": "x", "category": "math", "turns": ["1\u2028+ 1?"]}\n',
        encoding="utf-8",
    )
    assert read_questions(path) == (
        Question(question_id=81, category="writing", turns=("Write.", "Again.")),
        Question(question_id="x", category="math", turns=("1\u2028+ 1?",)),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not valid JSON \(.* column \d+ .*\); expected"),
        ("[1]", "line 2 is of another form; expected a table"),
        ('{"category": "a", "turns": ["b"]}', "line 2 has no 'question_id'"),
        ('{"question_id": 1, "turns": ["b"]}', "line 2 has no 'category'"),
        ('{"question_id": 1, "category": "a"}', "line 2 has no 'turns'"),
        ('{"question_id": 1, "category": 3, "turns": ["b"]}', "line 2 has 3 as 'category'; expected text"),
        ('{"question_id": 1, "category": "a", "turns": []}', "line 2 has an empty category, no turns, or an empty one"),
        (
            '{"question_id": 1, "category": "a", "turns": [""]}',
            "line 2 has an empty category, no turns, or an empty one",
        ),
        (
            '{"question_id": "5f0c", "category": "a", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE '
            'USING SPECDEC_BENCH\\n\\n{article}"]}',
            "line 2 has no text: SPEED-Bench leaves it to its own preparation script",
        ),
        ('{"question_id": 1, "category": "a", "turns": "b"}', "line 2 has 'b' as 'turns'; expected a list"),
        (
            '{"question_id": 1, "category": "c", "turns": ["d"]}',
            r"prompts\.jsonl, line 2 has the question_id 1 of an earlier line; .*: give every question an id",
        ),
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["b"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_questions(path)


def test_speed_bench_s_lines_are_questions(tmp_path: Path) -> None:
    path = tmp_path / "qualitative.jsonl"
    line = '{"question_id": "5f0c", "category": "math", "sub_category": "MATH", "turns": ["1 + 1?"], "source": "x", '
    path.write_text(line + '"src_id": "7", "difficulty": null, "multiturn": false}\n', encoding="utf-8")
    assert read_questions(path) == (Question(question_id="5f0c", category="math", turns=("1 + 1?",)),)


def test_empty_missing_and_binary_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_questions(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(ConfigError, match="has no questions"):
        read_questions(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text .* at byte 0"):
        read_questions(path)


def test_built_in_questions_have_several_turns_somewhere() -> None:
    assert max(len(question.turns) for question in BUILT_IN_QUESTIONS) == 2
    assert len({question.question_id for question in BUILT_IN_QUESTIONS}) == len(BUILT_IN_QUESTIONS)
