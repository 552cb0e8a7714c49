"""Answer lines: Spec-Bench's keys, and a file that survives being killed."""

import json
from pathlib import Path

import pytest

from mirrorsd.cli.bench.answers import Answer, AnswerFile, answer_line
from mirrorsd.cli.bench.entrants import step_lengths
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.errors import ConfigError

SPEC_BENCH_LINE = (
    '{"question_id": 81, "category": "writing", "answer_id": "7VXsGNxRZJTSrRjWnQxNaz", "model_id": "vicuna", '
    '"choices": [{"index": 0, "turns": ["a", "b"], "decoding_steps": [2, 1], "new_tokens": [3, 1], '
    '"wall_time": [0.5, 0.25], "accept_lengths": [2, 1, 1]}], "tstamp": 1700000000.0}'
)
"""As its evaluation writes one."""


def question(question_id: int | str) -> Question:
    return Question(question_id=question_id, category="writing", turns=("x", "y"))


def answers() -> list[Answer]:
    first = Answer(
        text="a",
        token_ids=[5, 6, 7],
        wall_s=0.5,
        finish_reason="length",
        num_steps=2,
        accept_lengths=[2, 1],
        window_lengths=[3, 0],
        step_ends_s=[0.3, 0.5],
        prefill_s=0.1,
        ttft_s=0.3,
        sources={"early": 1},
    )
    second = Answer(text="b", token_ids=[0], wall_s=0.25, finish_reason="eos", num_steps=1, accept_lengths=[1])
    return [first, second]


def test_a_line_has_spec_bench_s_keys_in_its_order_and_ours_behind_them() -> None:
    line = json.loads(json.dumps(answer_line(question(81), answers(), model_id="vicuna", seed=3)))
    theirs = json.loads(SPEC_BENCH_LINE)
    assert list(line) == list(theirs)
    own, their_choice = line["choices"][0], theirs["choices"][0]
    assert list(own)[: len(their_choice)] == list(their_choice)
    assert {name: own[name] for name in their_choice} == their_choice
    assert all(type(line[name]) is type(theirs[name]) for name in theirs)
    assert len(line["answer_id"]) == len(theirs["answer_id"])
    assert (own["tokens"], own["seed"], own["finish_reason"]) == ([[5, 6, 7], [0]], 3, ["length", "eos"])
    assert (own["sources"], own["prefill_s"]) == ([{"early": 1}, {}], [0.1, None])


def test_lengths_of_steps_add_up_to_the_text_also_where_it_ends_within_a_window() -> None:
    assert step_lengths([0, 0, 0], 3) == [1, 1, 1]
    assert step_lengths([2, 2], 5) == [3, 2]
    assert step_lengths([], 0) == []


def test_answers_are_found_again_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    file = AnswerFile(path)
    for name in (82, 81):
        file.add(answer_line(question(name), answers(), model_id="m", seed=None))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"question_id": 83, "choi')
    again = AnswerFile(path)
    assert path.read_bytes() == whole
    assert [name in again for name in (81, 82, 83)] == [True, True, False]
    again.sort([81, 82, 83])
    assert [line["question_id"] for line in AnswerFile(path).lines] == [81, 82]


def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"question_id": 1, "choices": [{"tokens": []}]}\n{"question_id": 2}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"plain.jsonl, line 2 is no answer of `mirrorsd bench`"):
        AnswerFile(path)
