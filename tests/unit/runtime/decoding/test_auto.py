"""`auto` runs what is cheapest, tries the others rarely, and changes no token."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from mirrorsd.runtime.backends.fake import FakeDraft
from mirrorsd.runtime.policy.methods import CostBook

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def simulate(costs: dict[str, float], num_tokens: int, book: CostBook | None = None) -> tuple[list[str], CostBook]:
    """Which method each step runs when a step of a method costs `costs[method]` seconds per token."""
    book = book or CostBook(tuple(costs))
    method, is_trial, num_steps, run = book.cheapest(), False, 0, []
    for _ in range(num_tokens):
        chosen, is_trial = book.next_method(method, num_steps, is_trial=is_trial)
        num_steps = num_steps + 1 if chosen == method else 1
        method = chosen
        run.append(method)
        book.observe(method, costs[method], 1)
    return run, book


def test_the_cheapest_method_gets_nearly_all_steps() -> None:
    for best in ("mirror", "serial", "plain"):
        costs = {"mirror": 3.0, "serial": 3.0, "plain": 3.0} | {best: 1.0}
        run, book = simulate(costs, 2000)
        assert run[1000:].count(best) > 0.95 * 1000
        assert book.cheapest() == best


def test_what_was_learned_serves_the_next_request() -> None:
    costs = {"mirror": 1.5, "serial": 1.4, "plain": 1.0}
    _, book = simulate(costs, 400)
    run, _ = simulate(costs, 128, book)
    assert sum(costs[method] for method in run) <= 1.03 * 128


def test_measured_speeds_spare_the_first_trials() -> None:
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 60.0, "serial": 70.0, "plain": 100.0})
    run, _ = simulate({"mirror": 1 / 60, "serial": 1 / 70, "plain": 1 / 100}, 60, book)
    assert run.count("plain") == 60


def test_a_trial_of_long_steps_waits_longer_for_the_next() -> None:
    """Six steps of four tokens, half as dear again: 12 tokens' time, half a per cent of 2,400."""
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 2.0, "serial": 3.0, "plain": 1.0}, {"mirror": 4.0, "serial": 4.0, "plain": 1.0})
    assert round(book.costs["mirror"].pause_tokens) == 2400
    assert round(book.costs["plain"].pause_tokens) == 2400


def test_a_method_that_became_faster_is_found_again() -> None:
    _, book = simulate({"mirror": 3.0, "serial": 3.0, "plain": 1.0}, 300)
    run, _ = simulate({"mirror": 0.3, "serial": 3.0, "plain": 1.0}, 3000, book)
    assert run[-200:].count("mirror") > 150


def test_small_differences_do_not_cause_switching() -> None:
    run, _ = simulate({"mirror": 1.0, "serial": 1.01, "plain": 0.99}, 1000)
    switches = sum(a != b for a, b in pairwise(run))
    assert switches < 70, "trials of close rivals come once in 64 tokens; nothing else switches"


def test_a_slow_useless_draft_leaves_plain_decoding(make_bench: Make) -> None:
    def useless(text: list[int]) -> list[int]:
        bench.target.seconds += 0.5
        return [99 % 16, 0, 0, 0]

    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=120)
    bench = make_bench(draft=FakeDraft(useless, vocab_size=16, num_streams=3), is_steady=True)
    assert bench.decode(PROMPT, "auto", max_new_tokens=120) == expected
    methods = [step.method for step in bench.last_request.steps]
    assert methods[-60:].count("plain") >= 54


def test_a_good_draft_beside_a_slow_target_is_used(make_bench: Make) -> None:
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=150)
    bench = make_bench(hit_rate=1.0, is_steady=True)
    assert bench.decode(PROMPT, "auto", max_new_tokens=150) == expected
    methods = [step.method for step in bench.last_request.steps]
    assert methods[-5:].count("plain") == 0


@pytest.mark.parametrize("takes_turns", [True, False])
def test_on_shared_cores_the_target_never_works_beside_the_draft(make_bench: Make, *, takes_turns: bool) -> None:
    """Windows on the side: beside passes of the target both would be slow. With devices of their own nobody waits."""
    bench = make_bench(hit_rate=0.1, takes_turns=takes_turns, gamma=4)
    started, pass_of = [], bench.target.run

    def run(*arguments: Any, **options: Any) -> Any:
        started.append(bench.engine.draft_worker.has_pending())
        return pass_of(*arguments, **options)

    def slowly(text: list[int]) -> list[int]:
        time.sleep(0.002)
        return [0] * 4

    bench.target.run = run
    bench.draft._handler = slowly
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=60)
    assert bench.decode(PROMPT, "auto", max_new_tokens=60) == expected
    assert bench.draft.num_passes > 0
    assert any(started) is not takes_turns


def test_methods_of_speculation_share_their_luck() -> None:
    """Serial steps that bring half of the usual show nothing about serial decoding as against mirror decoding."""
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 80.0, "serial": 100.0, "plain": 40.0}, {"mirror": 4.0, "serial": 4.0, "plain": 1.0})
    for brought in [4] * 10 + [2] * 20:
        book.observe("serial", 0.04, brought)
    costs = {name: cost.seconds_per_token for name, cost in book.costs.items()}
    assert costs["mirror"] / costs["serial"] == pytest.approx(100 / 80, rel=0.05)
    assert book.next_method("serial", 20, is_trial=False) == ("serial", False)


def test_a_machine_that_slows_down_is_not_mistaken_for_a_bad_text() -> None:
    """All takes three times as long as when it was tuned: speculation is as good as ever and must not stop."""
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 50.0, "serial": 100.0, "plain": 50.0}, {"mirror": 4.0, "serial": 4.0, "plain": 1.0})
    for _ in range(30):
        book.observe_pace(3.0)
        book.observe("serial", 3 * 0.04, 4)
    assert not book.is_saving
    assert book.costs["plain"].seconds_per_token == pytest.approx(3 / 50, rel=0.3)


def test_plain_steps_just_before_count_more_than_what_was_tuned() -> None:
    """Tuned at 20 ms a token, plain decoding takes 10 now: a step of speculation that takes 35 ms has not paid."""
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 50.0, "serial": 65.0, "plain": 50.0}, {"mirror": 2.0, "serial": 2.0, "plain": 1.0})
    for _ in range(60):
        book.observe("plain", 0.01, 1)
    before = book.purse
    book.observe_pace(1.2)
    book.observe("serial", 0.035, 2)
    assert book.purse < before


def test_plain_steps_correct_what_longer_passes_say_of_them() -> None:
    """Passes of many rows take as long as ever, those of one row half as long: speculation stops paying."""
    book = CostBook(("mirror", "serial", "plain"))
    book.start_from({"mirror": 50.0, "serial": 65.0, "plain": 50.0}, {"mirror": 2.0, "serial": 2.0, "plain": 1.0})
    for _ in range(40):
        book.observe_pace(1.0)
        book.observe("serial", 2 / 65, 2)
        book.observe("plain", 0.01, 1)
    assert book.costs["plain"].seconds_per_token < 1.3 * 0.01
    book.observe_pace(1.0)
    before = book.purse
    book.observe("serial", 2 / 65, 2)
    assert book.purse < before
