"""What plain decoding would take now, by the slowdown of the passes that run instead."""

import pytest

from mirrorsd.runtime.policy.times import PlainPace


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
