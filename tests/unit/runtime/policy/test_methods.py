"""What `auto` can lose against plain decoding is bounded: the purse, on hopeless texts and hopeless beginnings."""

import numpy as np
import pytest

from mirrorsd.runtime.policy.methods import CostBook

METHODS = ("mirror", "serial", "plain")


def loss(book: CostBook, num_tokens: int, steps: dict[str, tuple[float, int]]) -> float:
    """Time over plain decoding, less one, when a step of a method takes `seconds` for so many tokens."""
    method, is_trial, num_steps, seconds, tokens = book.cheapest(), False, 0, 0.0, 0
    while tokens < num_tokens:
        chosen, is_trial = book.next_method(method, num_steps, is_trial=is_trial)
        num_steps = num_steps + 1 if chosen == method else 1
        method = chosen
        seconds += steps[method][0]
        tokens += steps[method][1]
        book.observe(method, *steps[method])
    return seconds / (tokens * steps["plain"][0]) - 1.0


@pytest.mark.parametrize("excess", [0.1, 0.4, 0.7, 1.0])
def test_a_hopeless_draft_costs_three_percent_at_most(excess: float) -> None:
    hopeless = {"mirror": (1.0 + excess, 1), "serial": (1.1 + excess, 1), "plain": (1.0, 1)}
    book = CostBook(METHODS)
    assert loss(book, 128, hopeless) <= 0.03
    assert loss(book, 2000, hopeless) <= 0.025


@pytest.mark.parametrize("excess", [0.4, 0.7, 1.0])
def test_a_text_after_good_ones_costs_three_percent_at_most(excess: float) -> None:
    """What other texts gained is not this one's to lose."""
    book = CostBook(METHODS)
    fine = {"mirror": (1.2, 4), "serial": (1.7, 4), "plain": (1.0, 1)}
    assert loss(book, 600, fine) < -0.5
    hopeless = {"mirror": (1.0 + excess, 1), "serial": (1.1 + excess, 1), "plain": (1.0, 1)}
    book.begin_text()
    assert loss(book, 128, hopeless) <= 0.03


def test_a_good_draft_is_used_at_once_and_again_after_a_bad_text() -> None:
    fine = {"mirror": (1.2, 4), "serial": (1.7, 4), "plain": (1.0, 1)}
    book = CostBook(METHODS)
    assert loss(book, 128, fine) < -0.45
    loss(book, 128, {"mirror": (1.8, 1), "serial": (1.9, 1), "plain": (1.0, 1)})
    assert loss(book, 256, fine) < -0.3


def test_luck_does_not_end_a_draft_that_pays_on_the_whole() -> None:
    """Half of the steps accept nothing, as when sampling: still a third faster than plain, and kept."""
    book, random = CostBook(METHODS), np.random.default_rng(3)
    method, is_trial, num_steps, seconds, num_tokens = "plain", False, 0, 0.0, 0
    for _ in range(600):
        chosen, is_trial = book.next_method(method, num_steps, is_trial=is_trial)
        num_steps = num_steps + 1 if chosen == method else 1
        method = chosen
        tokens = 1 if method == "plain" else int(random.choice([1, 3]))
        cost = {"mirror": 1.35, "serial": 1.9, "plain": 1.0}[method]
        book.observe(method, cost, tokens)
        seconds, num_tokens = seconds + cost, num_tokens + tokens
    assert seconds / num_tokens < 0.8, "mirror alone takes 0.675, plain decoding 1"
