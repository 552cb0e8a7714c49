"""The sweep's bookkeeping: what is left to do after a stop, and what the report makes of the texts."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.bench.claims import sweep


def answer(
    arm: sweep.Arm, speed: float, *, prompt: int = 0, repeat: int = 0, task: str = "sums", **changes: Any
) -> sweep.Answer:
    figures = {"tokens_per_step": 2.0, "draft_exposed_ms": 1.0, "reuse_by_source": {"early": 0.5}, "seconds": 1.0}
    figures["repeat_rate"] = 0.25
    kept = {"tokens_per_second": speed, "steps": 10, "steps_by_method": {arm.method: 10}, **figures}
    kept |= {"prefill_ms": 3.0, "time_to_first_token_ms": 4.0}
    found = {"arm": arm.name, "prompt": prompt, "task": task, "repeat": repeat, "kept": kept, "ids": [1, 2]}
    return found | changes


def test_every_method_competes_in_every_layout_and_auto_once() -> None:
    arms = sweep.arms_of(["apart", "shared"])
    assert {(arm.layout, arm.method) for arm in arms[:-3]} == {
        (layout, method) for layout in ("apart", "shared") for method in ("plain", "serial", "mirror")
    }
    assert [arm.name for arm in arms[-3:]] == ["tuned serial", "tuned mirror", "auto"]
    assert arms[-1] == sweep.Arm("", "auto")
    assert len({arm.name for arm in arms}) == len(arms)


def test_fewer_prompts_than_rounds_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"question_id": "1", "category": "a", "turns": ["Once"]}\n', encoding="utf-8")
    options = argparse.Namespace(prompts=prompts, count=2, seconds=1.0)
    with pytest.raises(SystemExit, match=r"one\.jsonl has 1 prompts, 2 were asked for"):
        sweep.run(options, [], [(0, 0), (0, 1)])


def test_a_round_counts_once_every_arm_has_done_it(tmp_path: Path) -> None:
    arms = [sweep.Arm("apart", "plain"), sweep.Arm("", "auto")]
    answers = [answer(arms[0], 1.0), answer(arms[1], 1.0), answer(arms[0], 1.0, prompt=1)]
    assert sweep.finished(answers, arms) == {(0, 0)}
    work = tmp_path / "work.jsonl"
    work.write_text('{"arm": "auto"}\n{"arm": "cut o', encoding="utf-8")
    assert sweep.read(work) == [{"arm": "auto"}]
    assert sweep.read(tmp_path / "none.jsonl") == []


def test_auto_is_held_against_the_best_arm_and_the_fastest_plain_decoding() -> None:
    plain = [sweep.Arm("apart", "plain"), sweep.Arm("shared", "plain")]
    serial, auto = sweep.Arm("shared", "serial", 5, 2), sweep.Arm("", "auto")
    answers = [answer(plain[0], 50.0), answer(plain[1], 80.0), answer(auto, 190.0)]
    # A median over repeats (200), then all tokens of the task over all their time.
    answers += [answer(serial, speed, repeat=number) for number, speed in enumerate((200.0, 9.0, 201.0))]
    answers += [answer(serial, 200.0, prompt=1, ids=[1, 3])]
    found = sweep.summary(answers, [*plain, serial, auto], ["apart", "shared"])
    assert (found["best"], found["auto_to_best"]) == ("shared serial, gamma 5, 2 passes", 0.95)
    assert found["auto_to_plain"] == pytest.approx(190 / 80)
    assert found["rows"][2]["tokens_per_second"] == 200.0
    assert (found["rows"][2]["reuse"], found["rows"][2]["repeat_rate"]) == ({"early": 0.5}, 0.25)


def test_a_row_is_the_mean_of_the_tasks_and_a_task_its_tokens_over_their_time() -> None:
    arm = sweep.Arm("apart", "plain")
    answers = [answer(arm, 90.0, ids=[1] * 90), answer(arm, 10.0, prompt=1, ids=[1] * 10)]  # a second each
    answers += [answer(arm, 100.0, prompt=2, task="story", ids=[1] * 100)]
    found = sweep.row(arm, answers)
    assert found["by_task"] == {"sums": 50.0, "story": 100.0}
    assert found["tokens_per_second"] == 75.0
    assert (found["prefill_ms"], found["time_to_first_token_ms"]) == (3.0, 4.0)


def test_texts_that_differ_are_counted() -> None:
    arm = sweep.Arm("apart", "plain")
    texts = [answer(arm, 1.0), answer(arm, 1.0, ids=[1, 9]), answer(arm, 1.0, prompt=1, ids=[4])]
    assert sweep.different_texts(texts) == 1
