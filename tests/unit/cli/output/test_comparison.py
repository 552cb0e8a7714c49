"""Measuring and summing up: order, conversations, medians, differences."""

import doctest
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.cli.commands import inspect
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.cli.output import comparison
from mirrorsd.cli.output.comparison import Measurement, about_draft, find_differences, measure, summarise, verdict
from mirrorsd.graphs.errors import ContextLengthError

QUESTIONS = (
    Question(question_id="1", category="story", turns=("a", "b")),
    Question(question_id="2", category="sum", turns=("c",)),
)


def make_result(ids: list[int], tokens_per_second: float = 10.0, **stats: Any) -> Any:
    values = dict.fromkeys((*comparison.AVERAGED, *comparison.TIMES, "num_prompt_tokens"), 0.0)
    values |= {"tokens_per_second": tokens_per_second, "steps": 1, "num_drafted": 1} | stats
    return SimpleNamespace(text=str(ids), token_ids=ids, stats=SimpleNamespace(to_dict=lambda: values))


def make_measurement(method: str, question: Question, **stats: Any) -> Measurement:
    values = make_result([], **stats).stats.to_dict()
    return Measurement(question=question, turn=1, method=method, token_ids=(), stats=values)


def test_methods_are_interleaved_and_the_first_one_rotates() -> None:
    calls: list[tuple[str, str]] = []

    def answer(method: str, messages: list[dict[str, str]]) -> Any:
        calls.append((method, messages[-1]["content"]))
        return make_result([1])

    advanced: list[str] = []
    measure(QUESTIONS, ("plain", "mirror"), 1, answer, advanced.append)
    warm_up = [("plain", "a"), ("plain", "b"), ("mirror", "a"), ("mirror", "b")]
    assert calls == [*warm_up, *warm_up, ("mirror", "c"), ("plain", "c")]
    assert advanced == ["story 1", "sum 2"]


def test_answers_become_history() -> None:
    histories: list[list[str]] = []

    def answer(method: str, messages: list[dict[str, str]]) -> Any:
        histories.append([message["content"] for message in messages])
        return make_result([len(histories)])

    comparison.converse(QUESTIONS[0], "plain", answer, [])
    assert histories == [["a"], ["a", "[1]", "b"]]


def test_a_question_that_does_not_fit_is_left_out_and_named() -> None:
    def answer(method: str, messages: list[dict[str, str]]) -> Any:
        if messages[-1]["content"] in ("b", "c"):
            raise ContextLengthError("too long")
        return make_result([1])

    advanced: list[str] = []
    measurements = measure(QUESTIONS, ("plain", "mirror"), 1, answer, advanced.append)
    assert [(m.question.question_id, m.turn, m.method) for m in measurements] == [("1", 1, "plain"), ("1", 1, "mirror")]
    assert advanced == ["story 1: too long", "sum 2: too long"]
    with pytest.raises(ContextLengthError, match="too long"):
        measure(QUESTIONS[1:], ("plain",), 1, answer, advanced.append)


def test_speed_is_the_median_and_counts_are_weighted_by_steps() -> None:
    measurements = [
        make_measurement("plain", QUESTIONS[0], tokens_per_second=speed, steps=steps, mean_accepted=accepted)
        for speed, steps, accepted in ((10.0, 1, 1.0), (20.0, 3, 3.0), (90.0, 0, 7.0))
    ]
    row = summarise(measurements, ["plain"])[0]
    assert (row["method"], row["category"]) == ("plain", "story")
    assert row["tokens_per_second"] == 20.0
    assert row["mean_accepted"] == pytest.approx((1 * 1.0 + 3 * 3.0) / 4)


def test_all_is_the_mean_of_the_categories() -> None:
    measurements = [
        make_measurement("plain", QUESTIONS[0], tokens_per_second=10.0),
        make_measurement("plain", QUESTIONS[0], tokens_per_second=20.0),
        make_measurement("plain", QUESTIONS[1], tokens_per_second=45.0),
    ]
    rows = summarise(measurements, ["plain"])
    assert [row["category"] for row in rows] == ["story", "sum", "all"]
    assert rows[-1]["tokens_per_second"] == pytest.approx((15.0 + 45.0) / 2)


def test_the_prompt_and_the_first_token_are_shown_apart() -> None:
    prompts = ({"prefill_ms": ms, "time_to_first_token_ms": ms + 4.0, "num_prompt_tokens": 8 * ms} for ms in (1, 2, 9))
    row = summarise([make_measurement("plain", QUESTIONS[0], **stats) for stats in prompts], ["plain"])[-1]
    assert (row["prefill_ms"], row["time_to_first_token_ms"], row["num_prompt_tokens"]) == (2, 6.0, 32)


def test_speed_is_told_as_times_plain_of_the_same_questions() -> None:
    measurements = [
        make_measurement(method, question, tokens_per_second=speed)
        for method, question, speed in (
            ("plain", QUESTIONS[0], 10.0),
            ("auto", QUESTIONS[0], 20.0),
            ("plain", QUESTIONS[1], 30.0),
            ("auto", QUESTIONS[1], 40.0),
        )
    ]
    rows = summarise(measurements, ["plain", "auto"])
    assert [round(row["times_plain"], 2) for row in rows] == [1.0, 2.0, 1.0, 1.33, 1.0, 1.5]
    assert verdict(rows, is_identical=True) == "auto is 1.5 times plain here; all texts identical."
    assert verdict(rows, is_identical=False) == "auto is 1.5 times plain here; the texts are NOT identical."
    alone = summarise(measurements[1::2], ["auto"])
    assert verdict(alone, is_identical=True) == "All texts identical.", "without plain decoding there is no ratio"


def test_without_auto_the_fastest_method_speaks() -> None:
    speeds = {"plain": 10.0, "serial": 30.0, "mirror": 20.0}
    rows = summarise([make_measurement(m, QUESTIONS[0], tokens_per_second=s) for m, s in speeds.items()], list(speeds))
    assert verdict(rows, is_identical=True).startswith("serial is 3.0 times plain")


@pytest.mark.parametrize(("right", "word"), [(0.0, "never right (0.0%"), (0.04, "almost never right (4.0%"), (0.3, "")])
def test_a_useless_draft_is_called_that(right: float, word: str) -> None:
    drafted = {"draft_right": right, "num_drafted": 100}
    found = about_draft(summarise([make_measurement("serial", QUESTIONS[0], **drafted)], ["serial"]))
    assert word in found
    assert bool(word) == bool(found)


def test_the_share_of_right_tokens_is_weighted_by_how_many_were_drafted() -> None:
    pairs = ((0.5, 10), (1.0, 30))
    measurements = [make_measurement("serial", QUESTIONS[0], draft_right=r, num_drafted=n) for r, n in pairs]
    assert summarise(measurements, ["serial"])[0]["draft_right"] == pytest.approx(35 / 40)


def test_differences_name_method_and_place() -> None:
    ids = {"plain": (1, 2, 3), "serial": (1, 2, 3), "mirror": (1, 2, 4)}
    measurements = [
        Measurement(question=QUESTIONS[1], turn=1, method=method, token_ids=tokens, stats={})
        for method, tokens in ids.items()
    ]
    assert [(d.method, d.reference, d.position) for d in find_differences(measurements)] == [("mirror", "plain", 2)]
    assert find_differences(measurements[:2]) == []


def test_worked_examples() -> None:
    assert doctest.testmod(comparison).failed == 0
    assert doctest.testmod(inspect).failed == 0
