"""What joint passes take: what is learned from them, what is assumed before, and what is forgotten."""

from collections.abc import Sequence

import numpy as np
import pytest

from mirrorsd.runtime.devices.pass_times import PassTimes
from mirrorsd.runtime.ledger import Ledger, TargetPass
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.testing.fake import FakeTarget

VOCAB = 8


def new_passes(num_texts: int, num_guesses: int = 0, read: Sequence[tuple[int, int]] = ()) -> list[TargetPass]:
    """Passes of so many texts, the first with guesses, and parts of prompts: rows, and tokens before them."""
    session = FakeTarget(lambda _: np.zeros(VOCAB), vocab_size=VOCAB)
    rows = [(1 + num_guesses * (number == 0), 0, False) for number in range(num_texts)]
    rows += [(count, start, None) for count, start in read]
    return [
        TargetPass(
            session=session, tokens=np.zeros(count, np.int64), start=start, ledger=Ledger(), with_logits=with_logits
        )
        for count, start, with_logits in rows
    ]


def test_nothing_is_known_before_the_first_pass() -> None:
    times = PassTimes()
    assert (times.of_texts(1), times.of_prompt_row(100)) == (0.0, 0.0)


def test_the_longest_window_is_assumed_to_take_as_long_as_a_pass() -> None:
    times = PassTimes()
    times.observe(0.031, new_passes(1))
    assert times.of_texts(1) == pytest.approx(0.031)
    assert times.share == pytest.approx(1 / 31)
    assert times.of_prompt_row(0) == times.of_prompt_row(900) == pytest.approx(0.001)


def test_texts_guesses_and_rows_of_prompts_are_told_apart() -> None:
    """A pass takes 20 ms, a text 4, a guess 2, a prompt's row 1, and another one for every 1,000 tokens before it."""
    times = PassTimes(0.08)
    for number in range(300):
        texts, guesses, rows, start = 1 + number % 7, number % 3, number % 5 * 10, number % 60 * 25
        seconds = 0.020 + 0.004 * texts + 0.002 * guesses + 0.001 * rows * (1 + start / 1000)
        times.observe(seconds, new_passes(texts, guesses, [(rows, start)]))
    assert times.of_texts(0) == pytest.approx(0.020, rel=0.02)
    assert times.of_texts(8) == pytest.approx(0.052, rel=0.02), "no such pass was seen"
    assert times.of_guess == pytest.approx(0.002, rel=0.2)
    assert times.of_prompt_row(0) == pytest.approx(0.001, rel=0.05)
    assert times.of_prompt_row(3000) == pytest.approx(0.004, rel=0.05), "no row so far behind was seen"


def test_prompts_alone_say_what_their_rows_take_beside_texts() -> None:
    times = PassTimes()
    for rows in (128, 40, 128):
        times.observe(0.010 + 0.002 * rows, new_passes(0, read=[(rows, 0)]))
    assert times.of_prompt_row(0) == pytest.approx(0.002, rel=0.05)


def test_what_was_held_up_says_little() -> None:
    times = PassTimes(0.05)
    for number in range(30):
        times.observe(0.020 + 0.001 * (number % 4), new_passes(2, number % 4))
    for _ in range(20):
        times.observe(10.0, new_passes(2, 3))
    assert times.of_texts(2) == pytest.approx(0.020, rel=0.05)
    assert 0.0005 < times.of_guess < 0.002


def test_at_first_a_guess_takes_what_a_row_was_measured_to_take() -> None:
    known = Knowledge(target_ms=((1.0, 20.0), (7.0, 26.0)))
    times = PassTimes(known.row_share)
    times.observe(0.040, new_passes(1))
    assert times.of_guess == pytest.approx(0.002)
    assert Knowledge().row_share == 0


def test_a_machine_that_slows_down_and_recovers_leaves_guesses_their_share() -> None:
    """Windows are long while it is slow, and short just behind: that says nothing of guesses."""
    times = PassTimes()
    for slower, longest in ((1.0, 4), (3.0, 7), (1.0, 2), (0.5, 4)):
        for number in range(100):
            num_guesses = number * 5 % (1 + longest)
            times.observe(slower * (0.020 + 0.001 * num_guesses), new_passes(4, num_guesses))
            assert number < 20 or 0.5 < times.of_guess / times.of_texts(4) / 0.05 < 1.3


def test_what_changes_is_learned_again_and_what_is_not_seen_is_forgotten() -> None:
    times = PassTimes(0.05)
    for number in range(60):
        times.observe(0.020 + 0.001 * (number % 4), new_passes(4, number % 4))
    for number in range(500):
        times.observe(0.020 + 0.010 * (number % 2), new_passes(4, number % 2 * 4))
    assert times.of_guess == pytest.approx(0.0025, rel=0.2)
    for _ in range(1000):
        times.observe(0.020, new_passes(4))
    assert times.of_guess < 0.0015, "what seems too dear is tried again some time"
