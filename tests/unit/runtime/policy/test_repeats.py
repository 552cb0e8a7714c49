"""Texts that repeat themselves: what follows, how likely, and that `auto` drafts nothing where that is enough."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.policy.knowledge import DEFAULTS
from mirrorsd.runtime.policy.repeats import RepeatChances, RepeatedText
from mirrorsd.runtime.policy.windows import LearnedLengths, WindowLength

Make = Callable[..., Any]
LOOP = [5, 6, 7, 8, 9]
PROMPT = [1, 2, 3, 4, *LOOP]
FLAT = ((1.0, 20.0), (16.0, 21.0))


def cycle(text: list[int]) -> np.ndarray:
    """A model that says `LOOP` over and over."""
    logits = np.zeros(16)
    logits[LOOP[(LOOP.index(text[-1]) + 1) % len(LOOP)] if text[-1] in LOOP else LOOP[0]] = 9.0
    return logits


def followed(text: list[int], chances: RepeatChances | None = None, num_prompt: int = 1) -> RepeatedText:
    found = RepeatedText(chances or RepeatChances(), num_prompt)
    found.follow(np.array(text))
    return found


def test_a_loop_goes_on_beyond_the_end_of_the_text() -> None:
    text = np.array([1, *LOOP, *LOOP, 5])
    assert followed(text.tolist()).window(text, 12).tolist() == [6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]


def test_a_quotation_of_the_prompt_is_found() -> None:
    text = [11, 12, 13, 14, 15, 2, 3, 11, 12]
    assert followed(text, num_prompt=7).window(np.array(text), 3).tolist() == [13, 14, 15]


def test_a_new_text_repeats_nothing() -> None:
    assert followed([1, 2, 3, 4]).reach(5) == []


def test_longer_agreement_is_likelier_to_go_on() -> None:
    short, long = followed([*LOOP, 1, 5], num_prompt=7), followed([*LOOP, 1, *LOOP[:4]], num_prompt=10)
    assert short.reach(3)[0] < long.reach(3)[0]
    assert list(long.reach(9)) == sorted(long.reach(9), reverse=True)


def test_chances_follow_the_text() -> None:
    chances = RepeatChances()
    before = chances.reach(20, 1)[0]
    for _ in range(40):
        chances.observe(20, is_right=False)
    assert chances.reach(20, 1)[0] < 0.5 < before
    assert chances.reach(2, 1) == RepeatChances().reach(2, 1)


def test_the_prompt_itself_teaches_nothing() -> None:
    chances = RepeatChances()
    followed(LOOP * 9, chances, num_prompt=45)
    assert chances.reach(30, 1) == RepeatChances().reach(30, 1)


def length(learned: LearnedLengths) -> WindowLength:
    return WindowLength(FLAT, DEFAULTS["draft"].accept, learned)


def test_a_repeat_has_to_be_worth_more_than_what_else_could_be_done() -> None:
    one = length(LearnedLengths(50.0))
    assert one.cut_repeat([0.9, 0.8, 0.7], 3.0) == 0
    assert one.cut_repeat([0.9, 0.8, 0.7], 1.0) == 3


def test_a_repeat_that_is_hardly_worth_anything_is_left_alone() -> None:
    """However little else there is."""
    one = length(LearnedLengths(50.0))
    assert one.cut_repeat([0.5, 0.2, 0.1], 0.0) == 0
    assert one.cut_repeat([0.9, 0.8, 0.7], 0.0) == 3


@pytest.mark.parametrize("method", ["serial", "mirror"])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_auto_takes_windows_from_a_text_that_repeats_itself(
    make_bench: Make, method: str, temperature: float | None
) -> None:
    """The same text as plain decoding's in far fewer steps; the methods by themselves take all from the draft."""
    settings = {"max_new_tokens": 240, "temperature": temperature, "seed": 3 if temperature else None}
    expected = make_bench(target_handler=cycle).decode(PROMPT, "plain", **settings)
    sources = []
    for name in (method, "auto"):
        bench = make_bench(target_handler=cycle, hit_rate=0.5, gamma=8, is_steady=True)
        bench.engine.known.target_ms = ((1.0, 1000.0), (33.0, 1001.0))
        bench.engine.known.pairs[temperature is not None].method = method
        assert bench.decode(PROMPT, name, **settings) == expected
        sources.append(Counter(step.next_source for step in bench.last_request.steps))
    by_itself, in_auto = sources
    assert by_itself["text"] == 0
    assert in_auto["text"] > 3
    assert in_auto.total() < by_itself.total() / 2
