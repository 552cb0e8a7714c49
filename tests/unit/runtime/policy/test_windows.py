"""Windows are as long as their rows are worth, and rounds of the draft go to the worthiest rows.

Flat targets get long windows, dear rows and unsure tokens short ones.
"""

from collections.abc import Callable
from itertools import accumulate
from math import log
from operator import mul
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.ledger import Joint
from mirrorsd.runtime.policy.roots import DEFAULTS
from mirrorsd.runtime.policy.windows import (
    Confirmations,
    LearnedLengths,
    Ratio,
    RepeatChances,
    WindowLength,
    share_out,
    worth_by_rows,
)
from mirrorsd.texts.config import SpeculationConfig

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FLAT = ((1.0, 20.0), (8.0, 20.1))
STEEP = ((1.0, 20.0), (8.0, 150.0))
SURE, UNSURE = (log(0.95), log(0.02)), (log(0.3), log(0.25))
WEIGHTS = DEFAULTS["draft"].accept


def length(target_ms: Any, learned: LearnedLengths | None = None) -> WindowLength:
    return WindowLength(target_ms, WEIGHTS, learned or LearnedLengths(50.0))


def reaching(chances: list[float]) -> Callable[[int], list[float]]:
    """What a repeat of these chances reaches."""
    return lambda count: chances[:count]


def test_rows_that_cost_nothing_are_all_verified() -> None:
    assert length(FLAT).cut([SURE] * 9, 9, 12) == 9


def test_windows_shrink_as_company_grows() -> None:
    """A guessed row holds up everybody, so it must be worth its time to all of them."""
    windows = length(((1.0, 5.0), (33.0, 21.0)), LearnedLengths(150.0))
    chances = [0.8**row for row in range(1, 20)]
    found = []
    for num_beside in (0, 1, 3, 7):
        windows.joint = Joint(num_beside)
        found.append(windows.cut_repeat(reaching(chances), 9, 0.0))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_guesses_in_company_cost_what_they_were_seen_to_take() -> None:
    """Passes of one text alone say little of a row behind long texts beside others."""
    windows = length(((1.0, 5.0), (33.0, 21.0)), LearnedLengths(150.0))
    chances = [0.8**row for row in range(1, 20)]
    found = []
    for guess_s in (0.0, 0.00001, 0.01):
        windows.joint = Joint(3, guess_s)
        found.append(windows.cut_repeat(reaching(chances), 9, 0.0))
    assert found[1] > found[0] > found[2] == 0


def test_a_machine_that_is_slower_now_takes_as_much_longer_for_all() -> None:
    """Guesses are three times as dear in seconds as they were at load, and so is what is forgone for them."""
    chances, found = [0.8**row for row in range(1, 20)], []
    for slower in (1, 3):
        windows = length(((1.0, 20.0), (33.0, 52.0)), LearnedLengths(50.0 / slower))
        windows.joint = Joint(3, 0.001 * slower, texts_s=0.023 * slower)
        found.append(windows.cut_repeat(reaching(chances), 9, 0.0))
    assert found[0] == found[1] > 0


def test_limit_is_kept() -> None:
    assert length(FLAT).cut([SURE] * 9, 9, 4) == 4


def test_dear_rows_shorten_the_window() -> None:
    assert length(STEEP).cut([SURE] * 9, 9, 12) < length(FLAT).cut([SURE] * 9, 9, 12)


def test_unsure_tokens_are_not_worth_dear_rows() -> None:
    steep = length(STEEP)
    assert steep.cut([UNSURE] * 9, 9, 12) == 0
    assert steep.cut([SURE, *[UNSURE] * 8], 9, 12) == 1


def test_faster_text_makes_rows_dearer() -> None:
    """A row costs the tokens that its time would have brought."""
    slow, fast = (length(STEEP, LearnedLengths(speed)).cut([SURE] * 9, 9, 12) for speed in (50.0, 65.0))
    assert fast < slow


def test_a_window_is_held_against_what_it_promised_itself() -> None:
    """The next one is cut before its step is over: what was sure was always right, what was not never."""
    learned = LearnedLengths(50.0)
    one = length(FLAT, learned)
    sure = one.cut([SURE], 1, 1)
    for _ in range(60):
        one.begin()
        doubtful = one.cut([UNSURE], 1, 1)
        one.observe(sure, 1, 0.02)
        one.begin()
        sure = one.cut([SURE], 1, 1)
        one.observe(doubtful, 0, 0.02)
    assert (sure, doubtful) == (1, 1)
    assert learned.main.value > 0.7, "with each other's chances it would be below a half"


def test_what_was_not_cut_teaches_nothing_of_chances() -> None:
    """A form's own window, say."""
    learned = LearnedLengths(50.0)
    one = length(FLAT, learned)
    num_window = one.cut([SURE] * 2, 2, 2)
    one.begin()
    one.observe(num_window, num_window, 0.02)
    before = learned.main.value
    one.begin()
    one.observe(num_window, 0, 0.02)
    assert learned.main.value == before


def test_streams_that_keep_failing_are_trusted_less() -> None:
    learned = LearnedLengths(50.0)
    first = length(STEEP, learned).cut([SURE] * 4, 1, 12)
    for _ in range(40):
        one = length(FLAT, learned)
        num_window = one.cut([SURE] * 4, 1, 12)
        one.begin()
        one.observe(num_window, 1, 0.02)
    learned.tokens_per_second = 50.0
    assert learned.stream.value < 0.5 < learned.main.value
    assert length(STEEP, learned).cut([SURE] * 4, 1, 12) < first


def test_steps_whose_window_came_from_elsewhere_teach_no_chances() -> None:
    learned = LearnedLengths(50.0)
    length(FLAT, learned).observe(7, 0, 0.02)
    assert learned.main.value == learned.stream.value == 1.0


def test_a_text_that_was_right_throughout_is_cut_like_any_other() -> None:
    """A thousand right tokens in a row are no certainty, nor a division by nothing."""
    one = length(FLAT)
    for _ in range(100):
        one.observe(12, 12, 0.02)
    assert 0 < one.cut([SURE] * 9, 9, 12) <= 9


def test_another_pass_pays_where_it_is_cheap() -> None:
    one = length(FLAT)
    assert one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.001)
    assert not one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.1)


def test_another_pass_is_not_made_where_the_text_may_not_lose_as_much_as_both() -> None:
    """At 50 tokens per second a pass of 10 ms costs half a token."""
    one = length(FLAT, LearnedLengths(50.0))
    one.budget = 1.01
    assert one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.01)
    one.budget = 0.99
    assert not one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.01)


def test_the_last_pass_of_a_window_teaches_as_well() -> None:
    """Two passes are all that is allowed: whether the second pays is learned from the window that comes of it."""
    learned = LearnedLengths(50.0)
    for _ in range(20):
        one = length(FLAT, learned)
        assert one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.001)
        one.cut([SURE] * 12, 9, 12)
    rich = learned.gains[1].value
    for _ in range(20):
        one = length(FLAT, learned)
        one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.001)
        one.cut([SURE] * 4, 4, 12)
    assert rich > 1.5
    assert learned.gains[1].value < 0.8 * rich


def test_a_pass_that_was_not_made_teaches_nothing() -> None:
    learned = LearnedLengths(50.0)
    before = learned.gains[1].value
    one = length(FLAT, learned)
    assert not one.is_pass_worthwhile([SURE] * 4, 1, 1, 0.1)
    one.cut([SURE] * 4, 1, 12)
    assert learned.gains[1].value == before


def test_passes_that_bring_nothing_are_given_up() -> None:
    learned = LearnedLengths(50.0)
    asked = 0
    for _ in range(60):
        one = length(FLAT, learned)
        if one.is_pass_worthwhile([UNSURE] * 2, 1, 1, 0.003):
            asked += 1
            one.is_pass_worthwhile([UNSURE] * 2, 1, 2, 0.003)
    assert 0 < asked < 60


def _made_passes(learned: LearnedLengths, num_windows: int, num_brought: int, seconds: float) -> list[bool]:
    """Whether the second pass of each window was made, where it brings so many sure tokens beside the first four."""
    made = []
    for _ in range(num_windows):
        one = length(FLAT, learned)
        made.append(one.is_pass_worthwhile([SURE] * 4, 1, 1, seconds))
        num_window = one.cut([SURE] * (4 + num_brought * made[-1]), 4, 12)
        one.observe(num_window, num_window, (1 + num_window) / 50.0)
    return made


def test_a_pass_that_was_given_up_is_tried_again_when_texts_change() -> None:
    learned, seconds = LearnedLengths(50.0), 0.008
    in_vain = _made_passes(learned, 400, 0, seconds)
    assert not all(in_vain[:100])
    assert 50.0 * seconds * sum(in_vain[100:]) < 0.02 * 5 * 300, "trials cost a fiftieth of the time at most"
    assert all(_made_passes(learned, 200, 8, seconds)[100:])


@pytest.mark.parametrize("method", ["serial", "mirror"])
def test_cut_windows_change_no_token(make_bench: Make, method: str) -> None:
    """The draft is right half of the time, a row costs five times a pass: windows are short, the text is the same."""
    plain = make_bench(hit_rate=0.5).decode(PROMPT, "plain", max_new_tokens=80)
    bench = make_bench(hit_rate=0.5, gamma=6, passes=2)
    bench.engine.known.target_ms = ((1.0, 20.0), (8.0, 720.0))
    assert bench.decode(PROMPT, method, max_new_tokens=80) == plain
    cut = [step.num_window for step in bench.last_request.steps]
    full = make_bench(hit_rate=0.5, gamma=6, passes=2)
    full.decode(PROMPT, method, max_new_tokens=80)
    assert sum(cut) < sum(step.num_window for step in full.last_request.steps)


def test_full_windows_are_left_alone(make_bench: Make) -> None:
    bench = make_bench(hit_rate=0.5, gamma=6, window="full")
    bench.engine.known.target_ms = ((1.0, 20.0), (8.0, 720.0))
    bench.decode(PROMPT, "serial", max_new_tokens=40)
    assert bench.last_request.windows is None
    assert SpeculationConfig().window == "worthwhile"


def test_padded_passes_cost_the_same_whatever_the_window(make_bench: Make) -> None:
    bench = make_bench(hit_rate=0.5, gamma=6, pad_rows_to=8)
    bench.engine.known.target_ms = ((1.0, 20.0), (8.0, 720.0))
    bench.decode(PROMPT, "serial", max_new_tokens=40)
    assert bench.last_request.windows.pass_seconds(1) == bench.last_request.windows.pass_seconds(8)


def test_chances_follow_the_text() -> None:
    chances = RepeatChances()
    before = chances.reach(20, 1)[0]
    for _ in range(40):
        chances.observe(20, is_right=False)
    assert chances.reach(20, 1)[0] < 0.5 < before
    assert chances.reach(2, 1) == RepeatChances().reach(2, 1)


def test_a_repeat_reaches_as_far_as_the_chances_of_all_its_tokens_let_it() -> None:
    chances = RepeatChances()
    for length in (1, 3, 8, 40):
        one_by_one = accumulate((chances.chance(length + more, 1.5) for more in range(33)), mul)
        assert chances.reach(length, 33, 1.5) == pytest.approx([*one_by_one])
    assert chances.reach(3, 0) == []


def test_a_repeat_has_to_be_worth_more_than_what_else_could_be_done() -> None:
    one = length(((1.0, 20.0), (16.0, 21.0)))
    chances = [0.9, 0.8, 0.7, 1e-6, 1e-6, 1e-6, 1e-6]
    assert one.cut_repeat(reaching(chances), 3, 3.0) == 0
    assert one.cut_repeat(reaching(chances), 3, 1.0) == 3


def test_a_repeat_that_is_hardly_worth_anything_is_left_alone() -> None:
    """However little else there is."""
    one = length(((1.0, 20.0), (16.0, 21.0)))
    assert one.cut_repeat(reaching([0.05, 0.02, 0.01, 1e-6, 1e-6, 1e-6, 1e-6]), 3, 0.0) == 0
    assert one.cut_repeat(reaching([0.9, 0.8, 0.7, 1e-6, 1e-6, 1e-6, 1e-6]), 3, 0.0) == 3


def test_what_a_few_tokens_would_make_sure_is_left_to_the_next_step() -> None:
    """Of a long repeat that is likely wrong at once, a few tokens are verified first; a sure one goes as a whole."""
    steep = length(((1.0, 20.0), (32.0, 80.0)))
    doubtful = [0.2 * 0.98**row for row in range(63)]
    sure = [0.99**row for row in range(1, 64)]
    assert 0 < steep.cut_repeat(reaching(doubtful), 31, 0.0) < 16
    assert steep.cut_repeat(reaching(sure), 31, 0.0) == 31
    assert steep.cut_repeat(reaching([]), 31, 0.0) == 0


def split(window: WindowLength, reach: list[float], limit: int) -> list[float]:
    """What verifying `0 .. limit` tokens of a repeat now is worth, the step after it counted: all ways are tried."""
    now, costs = window._worths(reach[:limit]), [-worth for worth in window._worths([0.0] * limit)]
    return [
        now[count]
        + max(sum(reach[count + 1 : count + 1 + more]) - reach[count] * costs[more] for more in range(limit + 1))
        for count in range(limit + 1)
    ]


@pytest.mark.parametrize("slope", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("limit", [1, 4, 31])
def test_of_all_ways_to_split_a_repeat_the_worthiest_is_taken(slope: float, limit: int) -> None:
    one, random = length(((1.0, 20.0), (4.0, 20.0 + 4 * slope), (32.0, 20.0 + 31 * slope))), np.random.default_rng(1)
    for _ in range(60):
        first, rest = random.uniform(0.1, 1.0, 2)
        reach = [first * rest**row for row in range(2 * limit + 1)]
        worths = split(one, reach, limit)
        taken = one._split_repeat(reach, one._worths(reach[:limit]))
        assert worths[taken] == pytest.approx(max(worths))


@pytest.mark.parametrize("slope", [0.0, 0.2, 2.0, 9.0])
def test_the_first_tokens_of_a_repeat_tell_what_all_of_them_would(slope: float) -> None:
    """Most repeats are declined after a look at four of 63 chances; none that would be taken."""
    one, asked = length(((1.0, 20.0), (32.0, 20.0 + 31 * slope))), list[int]()
    for chance in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        chances = [chance**row for row in range(1, 64)]

        def reach(count: int, chances: list[float] = chances) -> list[float]:
            asked.append(count)
            return chances[:count]

        for least in (0.0, 0.5, 3.0):
            asked.clear()
            taken = one.cut_repeat(reach, 31, least)
            if max(one._worths(chances[:31])) > max(least, 0.1):
                assert asked[-1] == 63
            else:
                assert not taken
    assert one.cut_repeat(reaching([0.02**row for row in range(1, 64)]), 31, 0.0) == 0


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
    for _ in range(90):
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


def test_a_hopeless_token_ends_a_window_and_nothing_overflows() -> None:
    assert length(FLAT).cut([SURE, (-1e5, 0.0), SURE], 3, 12) == 1
