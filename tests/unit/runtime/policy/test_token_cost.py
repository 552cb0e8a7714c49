"""What a token of a method costs: its own steps' time, over what steps bring, which is the text's doing."""

from math import inf

import pytest

from mirrorsd.runtime.policy.token_cost import Luck, TokenCost


def test_a_method_that_never_ran_costs_nobody_knows_what() -> None:
    cost = TokenCost(Luck(), 64)
    assert (cost.seconds_per_token, cost.seconds_per_step, cost.tokens_per_step) == (inf, 0.0, 1.0)


@pytest.mark.parametrize(("seconds", "num_tokens", "expected"), [(2.0, 4, 0.5), (2.0, 1, 2.0), (0.03, 3, 0.01)])
def test_even_steps_cost_their_time_over_their_tokens(seconds: float, num_tokens: int, expected: float) -> None:
    cost = TokenCost(Luck(), 64)
    for _ in range(20):
        cost.observe(seconds, num_tokens)
    assert cost.seconds_per_token == pytest.approx(expected)
    assert (cost.num_steps, cost.tokens_per_step) == (20, pytest.approx(num_tokens))


def test_slower_steps_cost_more_and_richer_steps_less() -> None:
    def cost_after(seconds: float, num_tokens: float) -> float:
        cost = TokenCost(Luck(), 64)
        for _ in range(20):
            cost.observe(1.0, 3)
        for _ in range(20):
            cost.observe(seconds, num_tokens)
        return cost.seconds_per_token

    by_time, by_tokens = [cost_after(x, 3) for x in (0.5, 1.0, 2.0)], [cost_after(1.0, x) for x in (1, 3, 5)]
    assert by_time == sorted(by_time)
    assert by_tokens == sorted(by_tokens, reverse=True)


def test_a_machine_that_slows_down_is_followed() -> None:
    cost = TokenCost(Luck(), 64)
    for step in range(160):
        cost.observe(1.0 if step < 100 else 3.0, 1)
    assert 2.8 < cost.seconds_per_step < 3.0


def test_a_hard_passage_makes_every_method_dearer_not_only_the_one_that_runs() -> None:
    luck = Luck()
    idle, running = TokenCost(luck, 64), TokenCost(luck, 64)
    for cost in (idle, running):
        for _ in range(40):
            cost.observe(1.0, 4)
    before = idle.seconds_per_token, running.seconds_per_token
    for _ in range(60):
        running.observe(1.0, 2)
    assert idle.seconds_per_token > 1.5 * before[0]
    assert running.seconds_per_token > 1.5 * before[1]
    assert idle.seconds_per_token == pytest.approx(running.seconds_per_token, rel=0.25)


def test_methods_that_take_turns_on_one_text_are_told_apart_by_what_they_bring() -> None:
    luck = Luck()
    rich, poor = TokenCost(luck, 64), TokenCost(luck, 64)
    for _ in range(30):
        for cost, num_tokens in ((rich, 4), (poor, 2)):
            for _ in range(5):
                cost.observe(1.0, num_tokens)
    assert rich.tokens_per_step > 1.5 * poor.tokens_per_step
    assert rich.seconds_per_token < poor.seconds_per_token / 1.5


def test_what_was_measured_before_is_where_a_method_begins() -> None:
    luck = Luck()
    luck.observe(4.0, 6)
    cost, richer = TokenCost(luck, 64), TokenCost(luck, 64)
    cost.start_from(2.0, 1.0)
    richer.start_from(2.0, 1.5)
    assert (cost.seconds_per_step, cost.seconds_per_token) == (2.0, pytest.approx(0.5))
    assert cost.tokens_per_step < richer.tokens_per_step <= 6.0


def test_a_new_text_is_expected_to_be_like_most_not_like_the_last_one_s_end() -> None:
    luck = Luck()
    for step in range(310):
        luck.observe(4.0 if step < 300 else 1.0)
    assert luck.tokens_per_step < 3.0
    luck.begin_text()
    assert 3.5 < luck.tokens_per_step < 4.0


def test_whoever_runs_is_known_by_its_steps_in_a_row() -> None:
    luck = Luck()
    first, second = TokenCost(luck, 64), TokenCost(luck, 64)
    for cost in (first, first, second, first):
        cost.observe(1.0, 2)
    assert (luck.steps_since(first), luck.steps_since(second)) == (1, 0)
