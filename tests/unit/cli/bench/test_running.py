"""Asking everybody: the order, conversations, what is missing, what is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.cli.bench.answers import Answer
from mirrorsd.cli.bench.running import Plan, Prompts, ask_everybody, converse, keep_settings, read_settings, turns
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.errors import ConfigError, ContextLengthError

QUESTIONS = tuple(
    Question(question_id=number, category="rag", turns=("one",) if number % 2 else ("one", "two"))
    for number in range(6)
)
PROMPTS = Prompts(encode=lambda messages: [len(message["content"]) for message in messages], context=16)


class FakeEntrant:
    """Answers with its prompt's length; notes what it was asked, and stops at a given answer."""

    is_own = True

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name, self._fails_at = name, fails_at
        self.asked: list[tuple[list[int], int, int | None]] = []

    def answer(self, ids: Sequence[int], *, most: int, seed: int | None) -> Answer:
        self.asked.append((list(ids), most, seed))
        if self._fails_at == len(self.asked):
            raise RuntimeError("killed")
        write = lambda path: path.write_text("trace", encoding="utf-8")  # noqa: E731
        lengths = [1] * len(ids)
        return Answer(
            text="x" * len(ids),
            token_ids=list(ids),
            wall_s=1.0,
            finish_reason="eos",
            num_steps=len(ids),
            accept_lengths=lengths,
            write_trace=write,
        )


def plan(**values: Any) -> Plan:
    return Plan(**{"model": "m", "questions": QUESTIONS, "methods": ("plain", "auto"), "runs": 2} | values)


def nothing(stage: str, fraction: float) -> None:
    """Takes a report, and does nothing."""


def test_who_goes_first_is_drawn_for_every_question_and_stays_so() -> None:
    names = ["plain", "serial", "auto"]
    order = list(turns(plan(), QUESTIONS, names))
    assert order == list(turns(plan(), QUESTIONS, names))
    assert order != list(turns(plan(seed=1), QUESTIONS, names))
    by_question = [tuple(name for _, _, name in order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(found) == sorted(names) for found in by_question)
    assert len(set(by_question)) > 2
    assert [(run, question.question_id) for run, question, _ in order[::3]] == [
        (run, number) for run in range(2) for number in range(6)
    ]


def test_a_second_turn_hears_the_first_answer() -> None:
    entrant = FakeEntrant("plain")
    answers = converse(QUESTIONS[0], entrant, PROMPTS, 9, None)
    assert [answer.text for answer in answers] == ["x", "xxx"]
    assert entrant.asked == [([3], 9, None), ([3, 1, 3], 9, None)]


def test_a_turn_that_does_not_fit_ends_the_conversation_and_a_first_one_leaves_the_question_out(
    tmp_path: Path,
) -> None:
    small = Prompts(encode=PROMPTS.encode, context=3)
    assert len(converse(QUESTIONS[0], FakeEntrant("plain"), small, 9, None)) == 1
    long = Prompts(encode=lambda messages: [0] * (9 if len(messages[0]["content"]) > 3 else 1), context=9)
    questions = (*QUESTIONS, Question(question_id="long", category="rag", turns=("three",)))
    found = ask_everybody(tmp_path, plan(questions=questions, runs=1), [FakeEntrant("plain")], long, nothing)
    assert [line["question_id"] for line in found["plain"][0]] == list(range(6))
    with pytest.raises(ContextLengthError, match="No question fits into the bundle's context of 1 tokens"):
        ask_everybody(tmp_path, plan(), [], Prompts(encode=PROMPTS.encode, context=1), nothing)


def test_greedy_texts_have_no_seed_and_sampled_ones_one_per_run(tmp_path: Path) -> None:
    entrant = FakeEntrant("plain")
    ask_everybody(tmp_path, plan(temperature=1.0, seed=5, questions=QUESTIONS[1:2]), [entrant], PROMPTS, nothing)
    assert [seed for _, most, seed in entrant.asked if most == 1024] == [5, 6]
    assert plan().seed_of(1) is None


def test_what_was_answered_before_an_end_is_not_asked_again(tmp_path: Path) -> None:
    keep_settings(tmp_path, {"seed": 0})
    first = [FakeEntrant("plain"), FakeEntrant("auto", fails_at=3 + 5)]
    with pytest.raises(RuntimeError):
        ask_everybody(tmp_path, plan(), first, PROMPTS, nothing)
    before = {path: path.read_text(encoding="utf-8") for path in tmp_path.glob("run-*/*.jsonl")}
    assert before
    again = [FakeEntrant("plain"), FakeEntrant("auto")]
    shares: list[float] = []
    found = ask_everybody(tmp_path, plan(), again, PROMPTS, lambda stage, share: shares.append(share))
    for name, of_runs in found.items():
        assert [[line["question_id"] for line in lines] for lines in of_runs] == [list(range(6))] * 2, name
    num_done = sum(text.count("\n") for text in before.values())
    assert len(shares) == 1 + 24 - num_done, "a report for the warming up, and one for each that was missing"
    for path, text in before.items():
        assert set(text.splitlines()) <= set(path.read_text(encoding="utf-8").splitlines())
    once_more = FakeEntrant("plain")
    ask_everybody(tmp_path, plan(), [once_more], PROMPTS, nothing)
    assert once_more.asked == []


def test_the_first_question_of_what_is_compared_leaves_a_trace(tmp_path: Path) -> None:
    entrants = [FakeEntrant("plain"), FakeEntrant("auto")]
    ask_everybody(tmp_path, plan(), entrants, PROMPTS, nothing)
    assert [path.name for path in tmp_path.glob("trace-*")] == ["trace-auto.json"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    settings = {"temperature": 0.0, "methods": ("plain", "auto"), "versions": {"python": "3.11"}}
    keep_settings(folder, settings)
    (folder / "run-1").mkdir()
    (folder / "run-1" / "plain.jsonl").write_text("{}\n", encoding="utf-8")
    keep_settings(folder, settings)
    with pytest.raises(ConfigError, match=r"measured with temperature = 0.0; this run has 1.0. Give the same, or ano"):
        keep_settings(folder, settings | {"temperature": 1.0})
    with pytest.raises(ConfigError, match=r'methods = \["plain", "auto"\]; this run has \["plain"\]'):
        keep_settings(folder, settings | {"methods": ("plain",)})
    with pytest.raises(ConfigError, match=r"measured with peers = null; this run has"):
        keep_settings(folder, settings | {"peers": ["x"]})
    (folder / "settings.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings.json is not valid JSON .*; name another --out"):
        keep_settings(folder, settings)


def test_settings_without_answers_bind_nobody(tmp_path: Path) -> None:
    for runs in (1, 2):
        keep_settings(tmp_path, {"runs": runs})
    assert read_settings(tmp_path) == {"runs": 2}
