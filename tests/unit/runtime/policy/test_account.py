"""What drafting is worth, and what a text may lose on it: each text for itself."""

import numpy as np
import pytest

from mirrorsd.runtime.policy.account import Account, Attention, PairKnowledge
from mirrorsd.runtime.policy.pace import PlainPace

TARGET_MS = ((1.0, 10.0), (8.0, 12.0))
SPEEDS, TOKENS = {"mirror": 150.0, "serial": 180.0, "plain": 100.0}, {"mirror": 3.0, "serial": 3.6, "plain": 1.0}


def tuned(speeds: dict[str, float] | None = None) -> PairKnowledge:
    known = PairKnowledge()
    known.start_from(speeds or SPEEDS, TOKENS, TARGET_MS)
    return known


def lose(account: Account, num_steps: int) -> None:
    """Steps of speculation that take three plain tokens' time and bring one."""
    for _ in range(num_steps):
        account.observe_step(0.02, 0.01, 1, is_plain=False)


def test_what_was_measured_says_whether_to_draft_and_how() -> None:
    known = tuned()
    assert known.method == "serial"
    assert Account(known).worth_of_drafting(100.0, is_ready=False) > 0
    slow = tuned({"mirror": 70.0, "serial": 80.0, "plain": 100.0})
    assert Account(slow).worth_of_drafting(100.0, is_ready=False) < 0


def test_a_window_that_is_ready_costs_no_drafting() -> None:
    account = Account(tuned())
    ready, asked = (account.worth_of_drafting(180.0, is_ready=is_ready) for is_ready in (True, False))
    assert ready == pytest.approx(asked + 180.0 * tuned().draft_seconds)


def test_plain_tokens_in_company_put_aside_what_a_trial_and_a_reading_cost() -> None:
    """Their seconds teach nothing, but they count: else a draft that was given up in company stays so for ever."""
    known = tuned({"mirror": 70.0, "serial": 80.0, "plain": 100.0})
    account = Account(known)
    known.draft_seconds, known.joining_seconds, known.joining_tokens = 0.012, 1.0, 100.0
    before = known.plain_seconds
    assert not account.is_trial_due
    account.credit = 0.5
    assert not account.may_try(100.0, 0)
    for _ in range(200):
        account.observe_step_beside_others(1, is_plain=True)
    assert account.is_trial_due
    assert account.may_try(100.0, 0)
    assert 2 < account.credit < 3
    assert known.plain_seconds == before
    paying = Account(tuned())
    paying._known.joining_seconds, paying._known.joining_tokens = 1.0, 100.0
    assert not paying.may_join(100.0, 30)
    for _ in range(200):
        paying.observe_step_beside_others(1, is_plain=True)
    assert paying.may_join(100.0, 30)


def test_two_conversations_never_touch_each_other_s_credit() -> None:
    known = tuned()
    first = Account(known)
    lose(first, 3)
    assert first.is_resting
    spent = first.credit
    second = Account(known)
    assert (first.credit, first.is_resting) == (spent, True)
    assert not second.is_resting
    lose(second, 3)
    assert first.credit == spent


def test_a_text_where_drafting_is_not_expected_to_pay_begins_with_less() -> None:
    assert Account(tuned({"mirror": 70.0, "serial": 80.0, "plain": 100.0})).credit < Account(tuned()).credit


def test_what_was_gained_may_be_lost_again_but_not_all_of_it() -> None:
    account = Account(tuned())
    for _ in range(20):
        account.observe_step(0.01, 0.0, 4, is_plain=False)
    assert not account.is_resting
    lose(account, 3)
    assert not account.is_resting
    lose(account, 10)
    assert account.is_resting


def test_a_trial_that_promised_much_and_brought_nothing_is_no_reason_to_go_on() -> None:
    account = Account(tuned())
    lose(account, 3)
    for _ in range(400):
        account.observe_step(0.01, 0.0, 1, is_plain=True)
        if account.may_try(100.0, 0):
            break
    account.is_resting = True
    account.observe_window(5.0, 100.0, is_trial=True)
    account.verified(0)
    assert account.is_resting
    assert not account.may_try(100.0, 0)


def test_a_trial_that_has_paid_brings_drafting_back() -> None:
    account = Account(tuned())
    lose(account, 3)
    account.observe_window(5.0, 100.0, is_trial=True)
    account.verified(4)
    assert not account.is_resting
    assert account.worth_of_drafting(100.0, is_ready=False) > 0


def test_plain_steps_correct_what_longer_passes_say_of_plain_decoding() -> None:
    """Passes of many rows take as long as ever, those of one row half as long."""
    known = tuned()
    for _ in range(60):
        known.observe_pass(1.0)
        for _ in range(4):
            known.observe_plain(0.005, 1)
    assert known.plain_seconds == pytest.approx(0.005, rel=0.3)


def test_a_machine_that_slows_down_is_not_mistaken_for_a_bad_text() -> None:
    known, account = tuned(), Account(tuned())
    account = Account(known)
    for _ in range(30):
        known.observe_pass(3.0)
        account.observe_step(3 * 0.02, 0.0, 4, is_plain=False)
    assert not account.is_resting
    assert known.plain_seconds == pytest.approx(0.03, rel=0.05)


def test_a_draft_that_must_catch_up_is_tried_only_where_the_credit_covers_that() -> None:
    known = tuned()
    known.observe_drafting(0.05, 20)
    account = Account(known)
    account.observe_step(0.01, 0.0, 10, is_plain=True)
    account.credit = 2.0
    assert known.joining_seconds * known.plain_speed > 2.0 > known.draft_seconds * known.plain_speed
    assert account.may_try(0.0, 0)
    assert not account.may_try(0.0, 20)
    account.credit = 1.2 * (known.joining_seconds + known.draft_seconds) * known.plain_speed
    assert account.may_try(0.0, 20)
    assert not account.may_try(0.0, 200), "it has more to read"


def test_a_draft_that_pays_reads_once_plain_decoding_has_forgone_what_that_costs() -> None:
    known = tuned()
    known.observe_drafting(0.1, 100)
    account, cost = Account(known), known.reading_seconds(1000) * known.plain_speed
    assert account.may_join(0.0, int(1000 * 0.9 * account.credit / cost))
    waited = 0
    while not account.may_join(0.0, 1000):
        account.observe_step(0.01, 0.0, 1, is_plain=True)
        waited += 1
    assert cost < waited < 4 * cost, "a token that speculation makes in half the time forgoes less than one"
    account.observe_window(2.0, 100.0, is_trial=False)
    assert not account.may_join(0.0, 1000), "it has just been asked"


def test_what_reading_takes_is_learned_by_the_token() -> None:
    known = tuned()
    known.observe_drafting(known.draft_seconds + 0.2, 200)
    known.observe_drafting(known.draft_seconds, 1)
    assert known.reading_seconds(100) == pytest.approx(0.1, rel=0.02)


def test_a_window_that_begins_with_reading_costs_its_rounds_at_least() -> None:
    """Windows that were prepared beside the target's passes have cost it next to nothing: one from nothing does not."""
    known = tuned()
    known.draft_seconds = 0.0001
    account = Account(known)
    account.observe_step(0.01, 0.0, 10, is_plain=True)
    account.credit = 0.5
    seconds = 2 * account.credit / known.plain_speed
    assert known.joining_seconds == 0
    assert account.may_try(0.0, 0, seconds)
    assert not account.may_try(0.0, 20, seconds)


def test_what_plain_decoding_would_have_brought_counts_as_its_speed() -> None:
    known = tuned()
    before = known.plain_speed
    for _ in range(50):
        known.observe_free_rows(2)
    assert known.plain_speed > 1.8 * before


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
    assert pace.observe_pass(1.0) == pytest.approx(0.0116, rel=0.02)


def test_nothing_is_made_up_where_nothing_was_measured() -> None:
    pace = PlainPace()
    pace.observe_plain(0.010)
    assert pace.observe_pass(1.0) == 0.0


def looked(attention: Attention, num_tokens: int, gain: float, seconds: float) -> list[bool]:
    """Of each token of a text, whether somebody looked for a window; plain decoding makes 1,000 a second."""
    found = list[bool]()
    while len(found) < num_tokens:
        found.append(attention.left <= 0)
        if attention.left > 0:
            attention.left -= 1
        else:
            attention.observe(gain, seconds, 1000.0)
    return found


@pytest.mark.parametrize(("gain", "seconds"), [(0.2, 1e-4), (0.0, 9e-6), (-1.0, 0.0)])
def test_who_gains_or_hardly_takes_time_always_looks(gain: float, seconds: float) -> None:
    assert all(looked(Attention(), 2000, gain, seconds))


def test_where_looking_costs_more_than_it_brings_it_is_done_now_and_then() -> None:
    attention = Attention()
    assert all(looked(attention, 30, 0.0, 1e-4)), "at first something is expected of it"
    looked(attention, 400, 0.0, 1e-4)
    assert 0.01 < np.mean(looked(attention, 1000, 0.0, 1e-4)) < 0.02, "once in 65 tokens"
    assert any(looked(attention, 80, 6.0, 1e-4))
    assert np.mean(looked(attention, 100, 6.0, 1e-4)) > 0.9, "a text that gains is looked at"


def test_one_pause_of_the_machine_does_not_end_it() -> None:
    attention = Attention()
    looked(attention, 200, 0.05, 1e-5)
    attention.observe(0.05, 5.0, 1000.0)
    assert all(looked(attention, 50, 0.05, 1e-5))


def quiet_for(account: Account, *, until_tried: bool = True) -> int:
    """For how many tokens neither draft nor head is looked at again."""
    account.be_quiet(10, until_tried=until_tried)
    return sum(account.is_quiet(place) for place in range(10, 200))


def test_what_did_not_pay_is_looked_at_again_once_it_could_be_tried() -> None:
    known = PairKnowledge()
    known.start_plain(0.01)
    account = Account(known)
    account.count(1)  # of the four before a trial
    assert quiet_for(account) == 3
    account.count(3)
    known.draft_seconds = 0.01 * (account.credit + 0.195)
    assert not account.may_try(100.0, 0)
    assert quiet_for(account) == 20, "a hundredth of a token is put aside with each"
    known.draft_seconds = 10.0
    assert not account.may_try(100.0, 0)
    assert quiet_for(account) == 64
    assert quiet_for(account) == 4, "what was found the time before says nothing"
    assert quiet_for(account, until_tried=False) == 4
