"""What texts have taught, as plain numbers: kept and taken up again, and nothing else is taken."""

import json
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.draft.drafter import mix
from mirrorsd.runtime.policy.account import Account
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.windows import LearnedLengths
from mirrorsd.runtime.tuned import check_learned, learned_of, recall
from mirrorsd.texts.config import SpeculationConfig

CURVE = ((1.0, 20.0), (8.0, 30.0))


def taught(curve: tuple[tuple[float, float], ...] = CURVE) -> Knowledge:
    """By some texts, greedy and sampled, with a draft and a head."""
    known = Knowledge(target_ms=curve)
    for is_sampling in (False, True):
        pair, lengths = known.pairs[is_sampling], known.lengths[is_sampling]
        for _ in range(5):
            pair.observe_plain(0.022, 1)
        pair.brought = 1.5 + is_sampling
        pair.observe_drafting(0.004, 0)
        pair.observe_drafting(0.050, 40)
        lengths.main.observe(3.0, 4.0)
        lengths.gains[2].observe(0.5, 1.0)
        lengths.repeats.observe(9, is_right=True)
        lengths.repeats.settle(0.9, is_right=False)
        lengths.tokens_per_second = 80.0
        source, of_head = known.head("eagle3", is_sampling=is_sampling)
        source.brought, of_head.tokens_per_second = 0.25, 60.0
        of_head.main.observe(1.0, 4.0)
    return known


def test_what_was_learned_is_taken_up_again() -> None:
    known, again = taught(), Knowledge(target_ms=CURVE)
    recall(again, learned_of(known))
    assert learned_of(again) == learned_of(known)
    assert again.pairs[False].is_plain_known
    for is_sampling in (False, True):
        accounts = [Account(one.pairs[is_sampling]) for one in (known, again)]
        worths = [account.worth_of_drafting(50.0, is_ready=False) for account in accounts]
        assert worths[0] == pytest.approx(worths[1], rel=1e-4)
        assert worths[0] != Account(Knowledge().pairs[is_sampling]).worth_of_drafting(50.0, is_ready=False)
        repeats = [one.lengths[is_sampling].repeats for one in (known, again)]
        assert repeats[0].reach(9, 6) == pytest.approx(repeats[1].reach(9, 6), rel=1e-4)


def test_a_head_that_is_asked_meanwhile_for_the_first_time_disturbs_nobody() -> None:
    class Asking(LearnedLengths):
        """Another thread begins a text beside whoever looks at its speed."""

        def __init__(self, known: Knowledge) -> None:
            super().__init__()
            self._known = known

        def __getattribute__(self, name: str) -> Any:
            if name == "tokens_per_second":
                self._known.head("medusa", is_sampling=False)
            return super().__getattribute__(name)

    known = taught()
    known.lengths_of_heads["eagle3", False] = Asking(known)
    assert "greedy.eagle3" in learned_of(known)


def test_times_follow_a_machine_that_is_slower_today() -> None:
    known, slower = taught(), Knowledge(target_ms=tuple((rows, 3 * ms) for rows, ms in CURVE))
    recall(slower, learned_of(known))
    assert slower.pairs[False].plain_seconds == pytest.approx(3 * known.pairs[False].plain_seconds, rel=1e-4)
    assert slower.pairs[False].draft_seconds == pytest.approx(3 * known.pairs[False].draft_seconds, rel=1e-4)
    assert slower.lengths[True].tokens_per_second == pytest.approx(80.0 / 3, rel=1e-4)


def test_nothing_is_kept_where_nothing_was_learned_or_measured() -> None:
    assert learned_of(Knowledge(target_ms=CURVE)) == {}
    assert learned_of(taught(())) == {}


def test_a_plain_step_beside_another_program_is_not_kept_as_this_machine_s() -> None:
    known = Knowledge(target_ms=CURVE)
    for _ in range(5):
        known.pairs[False].observe_plain(0.100, 1)
    assert "greedy.plain" not in learned_of(known)


def test_it_is_numbers_by_known_names_and_no_more_for_more_texts() -> None:
    learned = learned_of(taught())
    check_learned(json.loads(json.dumps(learned)))
    assert all(isinstance(value, float) for values in learned.values() for value in values)
    assert len(json.dumps(learned)) < 8000


def test_whatever_a_window_has_brought_can_be_kept() -> None:
    """A pass more may have made windows worth less than without it, time and again."""
    known, random = taught(), Random(1)
    for is_sampling in (False, True):
        windows = known.windows(SpeculationConfig(), is_sampling=is_sampling)
        assert windows is not None
        windows.budget = 100.0
        for _ in range(300):
            for passes in range(1, 4):
                shares = [(random.uniform(-9, 0), random.uniform(-9, 0)) for _ in range(2 * passes)]
                windows.is_pass_worthwhile(shares, 2 * passes, passes, 1e-4)
            windows.observe(4, random.randrange(5), 0.02)
    learned = learned_of(known)
    assert min(learned["greedy.draft.gains"]) < 0
    check_learned(learned)


WRONG: Mapping[str, list[float]] = {
    "greedy": [1.0],
    "loud.plain": [1.0, 1.0],
    "greedy.plain": [0.0, 1.0],
    "greedy.plain.main": [1.0, 1.0],
    "greedy.what": [1.0, 1.0, 1.0, 1.0],
    "greedy.draft": [1.0, -1.0, 0.0, 1.0],
    "greedy.draft.main": [1.0, 0.0],
    "greedy.draft.repeats": [1.0, 1.0],
    "greedy.draft.speed": [float("nan")],
    "sampled.eagle3.speed": [0.0],
    "sampled.eagle3.what": [1.0],
    "sampled.eagle3.main": [-1.0, 1.0],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_have_been_learned_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="learned"):
        check_learned({name: WRONG[name]})


def test_any_number_in_any_place_is_refused_or_harmless() -> None:
    learned = learned_of(taught())
    taken = 0
    for (name, values), value in product(learned.items(), (-1e9, -1.0, 0.0, 1e-320, 1e5, float("inf"))):
        for place in range(len(values)):
            changed = {**learned, name: [*values[:place], value, *values[place + 1 :]]}
            try:
                check_learned(changed)
            except ValueError:
                continue
            known = Knowledge(target_ms=CURVE)
            recall(known, changed)
            account = Account(known.pairs[False])
            account.worth_of_drafting(50.0, is_ready=False)
            account.may_try(50.0, 10)
            repeats = known.lengths[False].repeats
            repeats.reach(9, 6)
            mix(np.array([4, 5]), np.log(np.array([0.6, 0.3])), 7, repeats.share(repeats.chance(3)))
            taken += 1
    assert taken > 50
