"""Texts that repeat themselves: what follows, and how likely."""

import numpy as np

from mirrorsd.runtime.draft.tree import RepeatedText
from mirrorsd.runtime.policy.windows import RepeatChances

LOOP = [5, 6, 7, 8, 9]


def followed(text: list[int], chances: RepeatChances | None = None, num_prompt: int = 1) -> RepeatedText:
    found = RepeatedText(chances or RepeatChances(), text[:num_prompt])
    found.follow(text[num_prompt:])
    return found


def test_a_text_read_piece_by_piece_gives_the_same_guesses() -> None:
    text = np.random.default_rng(0).integers(0, 6, 200).tolist()
    growing, found = RepeatedText(RepeatChances(), text[:1]), 0
    for stop in range(1, len(text)):
        whole = RepeatedText(RepeatChances(), text[:stop])
        assert growing.find(text[:stop]) == whole.find(text[:stop])
        found += whole.find(text[:stop]) is not None
        growing.follow(text[stop : stop + 1])
    assert found > 50


def test_a_text_that_nobody_watched_for_a_while_is_known_again() -> None:
    text, chances = [1, *LOOP, *LOOP, 2, 3, *LOOP[:3]], RepeatChances()
    rested = RepeatedText(chances, text[:1])
    rested.follow(text[1:8])
    rested.watch(is_wanted=False)
    rested.follow(text[8:9])
    before = [share.expected for share in chances.shares]
    rested.follow(text[9:])
    rested.watch(is_wanted=True)
    assert [share.expected for share in chances.shares] == before, "what nobody watched teaches nothing"
    assert rested.window(4).tolist() == [8, 9, 2, 3]
    assert rested.find(text) == followed(text).find(text)


def test_the_longest_end_that_stood_before_wins() -> None:
    text = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert followed(text).window(1).tolist() == [7]
    assert followed(text[-1:]).window(1).tolist() == []


def test_a_loop_goes_on_beyond_the_end_of_the_text() -> None:
    assert followed([1, *LOOP, *LOOP, 5]).window(12).tolist() == [6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]


def test_a_quotation_of_the_prompt_is_found() -> None:
    assert followed([11, 12, 13, 14, 15, 2, 3, 11, 12], num_prompt=7).window(3).tolist() == [13, 14, 15]


def test_a_new_text_repeats_nothing() -> None:
    assert followed([1, 2, 3, 4]).reach(5) == []
    assert followed([1, 2, 3, 4]).find([1, 9]) is None


def test_what_came_after_a_text_that_is_only_guessed_is_known_too() -> None:
    """The text stands after 3; a draft guesses that 7, 8, 4 and 5 come next."""
    text = followed([7, 8, 4, 5, 6, 1, 2, 3])
    guessed, alone = text.said(text.find([1, 2, 3, 7, 8, 4, 5])), text.said(text.find([8, 4, 5]))
    assert guessed is not None
    assert alone is not None
    assert guessed[0] == alone[0] == 6
    assert guessed[1] > alone[1], "four tokens that agree say more than three"


def test_a_window_goes_round_in_what_was_said_and_takes_no_more_of_it_than_was_asked() -> None:
    text = followed([1, 2, 7, 8, 1, 2])
    assert [text.window(count).tolist() for count in (1, 4, 9)] == [[7], [7, 8, 1, 2], [7, 8, 1, 2, 7, 8, 1, 2, 7]]


def test_a_guessed_text_keeps_its_place_while_it_repeats_and_ends_with_the_text() -> None:
    """Of two places the later one is found; from the earlier one on, it is the earlier one that goes on."""
    text = followed([7, 8, 1, 2, 3, 4, 9, 1, 2, 3, 5], num_prompt=11)
    later = text.find([1, 2, 3])
    assert later is not None
    assert text.said(later) == (5, 0.35)
    earlier = text.go_on(text.find([8, 1, 2]), [8, 1, 2, 3])
    assert text.said(earlier) == (4, 0.5)
    assert text.go_on(later, [1, 2, 3, 5]) is None, "nothing came after it"
    assert text.go_on(later, [1, 2, 3, 4]) == text.find([1, 2, 3, 4])


def test_what_never_comes_true_is_not_worth_saying() -> None:
    chances = RepeatChances()
    for _ in range(3000):
        chances.observe(1, is_right=False)
    text = followed([1, 2, 3], chances)
    assert text.find([2]) is not None
    assert text.said(text.find([2])) is None


def test_what_hardly_comes_true_is_not_said() -> None:
    text = followed([1, 2, 3, 4, 5, 1, 2, 3], num_prompt=8)
    assert text.said(text.find([2])) is None, "one token in ten"
    assert text.said(text.find([1, 2, 3])) == (4, 0.35)


def test_a_repeat_counts_beside_a_draft_as_much_as_came_true_against_it() -> None:
    trusted, doubted = RepeatChances(), RepeatChances()
    for _ in range(400):
        trusted.settle(0.5, is_right=True)
        doubted.settle(0.5, is_right=False)
    assert trusted.share(0.5) == 0.5, "never more than its chance"
    assert doubted.share(0.5) < 0.01


def test_longer_agreement_is_likelier_to_go_on() -> None:
    short, long = followed([*LOOP, 1, 5], num_prompt=7), followed([*LOOP, 1, *LOOP[:4]], num_prompt=10)
    assert short.reach(3)[0] < long.reach(3)[0]
    assert list(long.reach(9)) == sorted(long.reach(9), reverse=True)


def test_a_text_that_repeats_itself_seldomer_than_others_is_trusted_less() -> None:
    chances = RepeatChances()
    fickle = followed([1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1], chances)
    assert fickle.reach(1)[0] < chances.reach(1, 1)[0]
    assert followed([1, 2, 1], chances).reach(1) == chances.reach(1, 1), "a text of which nothing is known yet"
    faithful = followed([1, 2] * 4 + [1], chances)
    assert faithful.reach(1)[0] >= chances.reach(7, 1)[0]


def test_what_is_nearly_sure_stays_so_in_a_text_that_hardly_repeats_itself() -> None:
    chances = RepeatChances()
    for _ in range(300):
        chances.observe(20, is_right=True)
    assert chances.reach(20, 1, 0.5)[0] > 0.95 > chances.reach(2, 1, 0.5)[0] * 4


def test_the_prompt_itself_teaches_nothing() -> None:
    chances = RepeatChances()
    followed(LOOP * 9, chances, num_prompt=45)
    assert chances.reach(30, 1) == RepeatChances().reach(30, 1)
