"""The arithmetic of the tables, against numbers made by hand."""

from typing import Any

import numpy as np
import pytest
from answer_lines import line

from mirrorsd.cli.bench import tables


def row(rows: list[dict[str, Any]], task: str, method: str) -> dict[str, Any]:
    return next(found for found in rows if (found["task"], found["method"]) == (task, method))


def test_a_speed_up_is_the_ratio_of_the_means_of_the_questions_speeds() -> None:
    plain = [line(1, 10, 1.0), line(2, 10, 5.0)]  # 10 and 2 tokens per second: 6
    auto = [line(1, 10, 0.5), line(2, 10, 2.5)]  # 20 and 4: 12
    slow = [line(1, 10, 0.5), line(2, 10, 10.0)]  # 20 and 1: 10.5, though it took longer in all
    rows = tables.summarise({"plain": [plain], "auto": [auto], "slow": [slow]})
    assert row(rows, "rag", "plain")["tokens_per_second"] == pytest.approx(6.0)
    assert row(rows, "rag", "auto")["over_plain"] == pytest.approx(2.0)
    assert row(rows, "rag", "auto")["interval"] == pytest.approx([2.0, 2.0])
    assert row(rows, "all", "slow")["over_plain"] == pytest.approx(10.5 / 6)
    assert row(rows, "all", "slow")["decode_tokens_per_second"] == pytest.approx(21.0)
    assert row(rows, "all", "auto")["ttft_ms"] == pytest.approx(1e3 * (0.125 + 0.625) / 2)


def test_several_runs_are_their_mean_and_their_deviation_is_told() -> None:
    runs = [[line(1, 10, 1.0)], [line(1, 10, 0.5)]]
    found = row(tables.summarise({"plain": [runs[0], runs[0]], "auto": runs}), "rag", "auto")
    assert found["tokens_per_second"] == pytest.approx(15.0)
    assert found["deviation_of_runs"] == pytest.approx(50**0.5), "of 10 and 20, as the board's: by one run less"
    assert (found["runs"], found["questions"]) == (2, 1)
    assert found["interval"] is None, "one question says nothing about others"


def test_turns_of_a_question_count_together_and_tasks_by_themselves() -> None:
    two = {"new_tokens": [30, 10], "wall_time": [2.0, 2.0], "prefill_s": [1.0, 1.0]}
    two |= {"tokens": [[], []], "step_ends_s": [[], []], "ttft_s": [None, None], "accept_lengths": []}
    two["window_lengths"] = [[], []]
    story = line(81, 1, 1.0, category="math")
    story["choices"][0] |= two
    rows = tables.summarise({"plain": [[story, line(7, 4, 1.0, category="qa")]]})
    assert [(found["task"], found["tokens_per_second"]) for found in rows] == [
        ("mt_bench", 10.0),
        ("qa", 4.0),
        ("all", 7.0),
    ]
    assert row(rows, "mt_bench", "plain")["decode_tokens_per_second"] == 20.0
    assert row(rows, "mt_bench", "plain")["tokens_per_step"] is None


def test_a_text_counts_up_to_where_it_repeats_itself() -> None:
    unit = [11, 12, 13, 14, 15, 16, 17, 18]
    tokens = [1, 2, 3, *unit, *unit, *unit, 9]
    assert tables.loop_start(tokens) == 3 + 8
    assert tables.loop_start([1, 2, 3, *unit, *unit, 9]) == 20, "twice is no loop"
    spaced = [*unit, 1, *unit, 2, *unit]
    assert tables.loop_start(spaced) == 9
    ends = [0.5 + 0.5 * (number + 1) for number in range(14)]
    looping = line(1, 28, 7.5, tokens=[tokens], accept_lengths=[2] * 14, step_ends_s=[ends], prefill_s=[0.5])
    looping["choices"][0]["window_lengths"] = [[1] * 14]
    # the 11th token comes with the 6th step: 12 tokens in 3 seconds
    assert tables.speed_before_loops(looping, [11]) == pytest.approx(4.0)
    found = row(tables.summarise({"plain": [[looping, line(2, 4, 1.0)]]}), "rag", "plain")
    assert found["turns_with_loops"] == 0.5


def test_two_turns_share_the_list_of_lengths_in_order() -> None:
    two = line(1, 1, 1.0)
    choice = two["choices"][0]
    choice |= {"tokens": [[1, 2, 3], [4, 5]], "accept_lengths": [2, 1, 2], "prefill_s": [1.0, 1.0]}
    choice |= {"step_ends_s": [[2.0, 3.0], [2.0]], "new_tokens": [3, 2], "wall_time": [3.0, 2.0]}
    assert tables.speed_before_loops(two, [3, 2]) == pytest.approx(5 / 3)


def test_what_a_runtime_does_not_say_is_not_made_up() -> None:
    peer = line(1, 4, 1.0, prefill_s=[None], step_ends_s=[[]], accept_lengths=[], window_lengths=[[]], ttft_s=[None])
    found = row(tables.summarise({"plain": [[line(1, 2, 1.0)]], "peer": [[peer]]}), "rag", "peer")
    assert found["over_plain"] == pytest.approx(2.0)
    for name in ("decode_tokens_per_second", "decode_over_plain", "before_loops_over_plain", "ttft_ms"):
        assert found[name] is None
    assert (found["tokens_per_step"], found["accepted_at"], found["reuse_by_source"]) == (None, [], {})


def test_without_plain_decoding_there_is_no_ratio() -> None:
    found = row(tables.summarise({"auto": [[line(1, 4, 1.0)]]}), "all", "auto")
    assert (found["tokens_per_second"], found["over_plain"], found["interval"]) == (4.0, None, None)


def test_the_interval_keeps_a_question_with_its_plain_partner() -> None:
    random = np.random.default_rng(1)
    plain = random.uniform(1, 100, size=60)
    twice = np.stack((2 * plain, plain), axis=1)
    assert tables.bootstrap(twice) == pytest.approx([2.0, 2.0])
    noisy = np.stack((plain * random.uniform(1, 3, size=60), plain), axis=1)
    low, high = tables.bootstrap(noisy) or (0, 0)
    assert low < noisy[:, 0].mean() / noisy[:, 1].mean() < high
    # the ratio's own standard error by the delta method, times 3.92, is about the interval's width
    residual = noisy[:, 0] - noisy[:, 1] * noisy[:, 0].mean() / noisy[:, 1].mean()
    assert high - low == pytest.approx(3.92 * residual.std() / np.sqrt(60) / noisy[:, 1].mean(), rel=0.15)


def test_sources_are_shares_of_all_that_was_wanted() -> None:
    lines = [line(1, 2, 1.0, sources=[{"early": 2, "fresh": 1}]), line(2, 2, 1.0, sources=[{"fresh": 1}])]
    found = row(tables.summarise({"auto": [lines]}), "all", "auto")
    assert found["reuse_by_source"] == {"early": 0.5, "fresh": 0.5}


def test_the_first_different_token_is_named_with_its_question_and_run() -> None:
    plain = [line(1, 3, 1.0), line(2, 3, 1.0)]
    other = [line(1, 3, 1.0), line(2, 3, 1.0, tokens=[[0, 1, 9]])]
    runs = {"plain": [plain, plain], "auto": [plain, other]}
    (found,) = tables.find_differences(runs, ["plain", "auto"])
    assert (found.question_id, found.run, found.turn, found.position) == (2, 2, 1, 2)
    assert (found.method, found.reference) == ("auto", "plain")
    assert tables.find_differences(runs, ["auto"]) == []


def test_other_runtimes_end_a_text_with_whichever_token() -> None:
    """Llama 3's texts may end with three, and a runtime says only that one came."""
    ours, theirs = ([line(1, 3, 1.0, tokens=[[5, 6, end]], finish_reason=["eos"])] for end in (8, 9))
    runs = {"plain": [ours], "peer": [theirs]}
    assert tables.find_differences(runs, ["plain", "peer"], with_ends=False) == []
    assert len(tables.find_differences(runs, ["plain", "peer"])) == 1
    theirs[0]["choices"][0]["finish_reason"] = ["length"]
    assert len(tables.find_differences(runs, ["plain", "peer"], with_ends=False)) == 1


def test_a_point_is_a_question_s_mean_over_its_runs() -> None:
    runs = {"plain": [[line(1, 4, 2.0)]], "auto": [[line(1, 4, 1.0)], [line(1, 8, 1.0)]]}
    found = next(point for point in tables.points(runs) if point["method"] == "auto")
    assert (found["over_plain"], found["tokens_per_step"], found["task"]) == (3.0, 1.0, "rag")
