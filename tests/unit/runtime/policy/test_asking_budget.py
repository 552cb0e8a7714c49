"""Windows on the side are paid for: the dearer one is, the rarer they come."""

import pytest

from mirrorsd.runtime.policy.asking_budget import AskingBudget
from mirrorsd.runtime.policy.methods import CostBook


def test_what_a_window_cost_must_be_put_aside_before_the_next() -> None:
    budget = AskingBudget()
    assert budget.is_enough, "nobody knows yet what one costs"
    budget.pay(3.0)
    budget.pay(1.5)
    budget.settle()
    assert budget.cost == 4.5
    waited = 0
    while not budget.is_enough:
        budget.put_aside(1)
        waited += 1
    assert 400 < waited < 500, "4.5 and the 2.5 that it cost too much, at 1.5 per cent"


def test_windows_that_cost_nothing_are_never_waited_for() -> None:
    budget = AskingBudget()
    for _ in range(50):
        assert budget.is_enough
        budget.pay(0.01)
        budget.settle()
        budget.put_aside(4)


def test_a_step_beside_the_draft_pays_for_it() -> None:
    """A plain step of a second takes three while the draft works: that is not what plain steps take."""
    book = CostBook()
    book.start_from({"plain": 1.0, "serial": 0.9, "mirror": 0.8}, {"plain": 1.0, "serial": 2.0, "mirror": 2.0})
    book.asking.put_aside(200)
    assert book.may_ask()
    for _ in range(2):
        book.observe("plain", 3.0, 1, is_disturbed=True)
    book.asking.settle()
    assert book.asking.cost == pytest.approx(0.7 * (2 / 0.9 - 1) + 0.3 * 4.0), "what was expected, and what it took"
    assert not book.may_ask()
    book.begin_text()
    assert not book.may_ask(), "plain decoding is the fastest here: a new text is no reason to ask"


def test_where_plain_decoding_is_the_fastest_the_first_window_is_paid_for_as_well() -> None:
    """A step of speculation takes 2.2 plain ones: a window on the side is expected to cost the 1.2 beyond its own."""
    book = CostBook()
    book.start_from({"plain": 1.0, "serial": 0.9, "mirror": 0.8}, {"plain": 1.0, "serial": 2.0, "mirror": 2.0})
    waited = 0
    while not book.may_ask():
        book.observe("plain", 1.0, 1)
        waited += 1
    assert 70 < waited < 90, "1.2 at 1.5 per cent"


def test_where_speculation_is_the_fastest_a_text_may_ask_at_once() -> None:
    book = CostBook()
    book.start_from({"plain": 1.0, "serial": 2.0, "mirror": 1.8}, {"plain": 1.0, "serial": 4.0, "mirror": 4.0})
    assert book.may_ask()


def test_what_nobody_has_tried_is_always_asked_about() -> None:
    book = CostBook()
    book.observe("plain", 1.0, 1)
    book.observe("plain", 9.0, 1, is_disturbed=True)
    book.asking.settle()
    assert book.may_ask()
