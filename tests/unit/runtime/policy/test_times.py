"""How long parts take, learned while running, and which rows of a round are worth their time."""

from collections.abc import Callable
from typing import Any

import pytest

from mirrorsd.runtime.policy.times import Confirmations, PlainPace, Ratio, share_out, worth_by_rows


def test_it_follows_the_machine_while_speculation_runs() -> None:
    pace = PlainPace(0.010)
    assert [pace.observe_pass(slowdown) for slowdown in (1.0, 1.5, 0.8)] == pytest.approx([0.010, 0.015, 0.008])


def test_the_first_plain_steps_replace_what_was_tuned() -> None:
    pace = PlainPace(0.020)
    for _ in range(20):
        pace.observe_plain(0.012)
    assert pace.observe_pass(1.2) == pytest.approx(0.012)
    assert pace.observe_pass(1.0) == pytest.approx(0.010)


def test_a_machine_that_slows_down_during_plain_decoding_is_counted_once() -> None:
    pace = PlainPace(0.010)
    pace.observe_pass(1.0)
    for _ in range(4):
        pace.observe_plain(0.010)
    for _ in range(60):
        pace.observe_plain(0.020)
    assert pace.observe_pass(2.0) == pytest.approx(0.020)


def test_plain_steps_behind_the_last_pass_are_compared_with_it() -> None:
    pace = PlainPace(0.010)
    for _ in range(5):
        pace.observe_pass(1.0)
    for _ in range(4):
        pace.observe_plain(0.007)
    assert pace.reference == pytest.approx(0.007)


def test_once_much_was_compared_a_slow_end_of_a_text_changes_little() -> None:
    pace = PlainPace(0.010)
    for _ in range(10):
        pace.observe_pass(1.0)
        for _ in range(20):
            pace.observe_plain(0.010)
    for _ in range(20):
        pace.observe_plain(0.018)
    assert pace.observe_pass(1.0) == pytest.approx(0.011, rel=0.02)


def test_nothing_is_made_up_where_nothing_was_measured() -> None:
    pace = PlainPace()
    pace.observe_plain(0.010)
    assert pace.observe_pass(1.0) == 0.0


Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_a_round_goes_to_the_worthiest_rows_of_all_branches() -> None:
    assert share_out([[8.0, 4.0, 2.0], [3.0, 1.0], [2.5]], 4) == [2, 1, 1]


def test_rows_that_are_left_over_are_not_invented() -> None:
    assert share_out([[8.0], [3.0, 1.0]], 9) == [1, 2]
    assert share_out([], 9) == []


def test_rows_that_feed_the_chain_are_worth_nothing() -> None:
    assert worth_by_rows([], 2).tolist() == [0.0, 0.0, 0.0]
    assert worth_by_rows([[1.0]], 2).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_guesses_that_are_seldom_confirmed_lose_their_rows() -> None:
    seen = Confirmations(3)
    for _ in range(60):
        seen.observe(4, 2)
    first, second, third, _ = seen.chances(4).tolist()
    assert (first, second > 0.9, third < 0.1) == (1.0, True, True)


def test_only_guesses_that_were_tried_teach() -> None:
    seen = Confirmations(3)
    before = seen.chances(4).tolist()
    seen.observe(1, 1)
    assert seen.chances(4).tolist() == before


def test_a_window_and_its_roots_are_fed_in_one_round(make_bench: Make, confident_exit: Make) -> None:
    """Nothing is fed alone while roots could be fed with it: the first round beside a pass prepares branches."""
    bench = make_bench(hit_rate=0.7, gamma=4, roots=8, is_steady=True, exit_handler=confident_exit)
    plain = make_bench(hit_rate=0.7).decode(PROMPT, "plain", max_new_tokens=60)
    assert bench.decode(PROMPT, "mirror", max_new_tokens=60) == plain
    reused = [step.next_source for step in bench.last_request.steps]
    assert reused.count("early") + reused.count("exit") > 0.8 * len(reused)


def test_a_ratio_outlives_a_dozen_cases_of_bad_luck() -> None:
    """Of 200 cases that came true, twelve that did not leave more than two thirds: each weighs a fiftieth."""
    ratio = Ratio()
    for _ in range(200):
        ratio.observe(1.0, 1.0)
    for _ in range(12):
        ratio.observe(0.0, 1.0)
    assert ratio.value == pytest.approx(0.98**12, abs=0.01)
