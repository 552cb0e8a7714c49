"""A request's text, what of a window can still be useful, and how it is cancelled."""

import threading
from typing import Any

import numpy as np
import pytest

from mirrorsd.graphs.errors import Cancelled, ContextLengthError, GenerationError
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.ledger import ALONE, Joint
from mirrorsd.texts.config import CancelToken, GenerationConfig, SpeculationConfig


def make_request(prompt: list[int], *, context: int = 64, gamma: int = 4, **settings: Any) -> Request:
    config = GenerationConfig(**settings)
    return Request(prompt, config, SpeculationConfig(gamma=gamma), context, threading.Event())


def test_what_is_committed_follows_the_prompt() -> None:
    request = make_request([1, 2, 3])
    request.commit([7, 8], [1.0, 1.0], 0.1)
    request.commit([9], [1.0], 0.1)
    assert request.tokens.tolist() == [1, 2, 3, 7, 8, 9]
    assert (request.num_prompt, request.num_new) == (3, 3)


def test_a_window_is_no_text_until_it_is_committed() -> None:
    request = make_request([1, 2, 3])
    assert request.text_with(np.array([7, 8, 9])).tolist() == [1, 2, 3, 7, 8, 9]
    assert request.tokens.tolist() == [1, 2, 3]
    request.commit([5], [1.0], 0.1)
    assert request.text_with(np.array([6])).tolist() == [1, 2, 3, 5, 6]


def test_near_ties_are_told_by_their_place_in_the_text() -> None:
    request = make_request([1, 2, 3])
    request.commit([7, 8, 9], [0.5, 0.01, 0.1], 0.1)
    request.commit([5], [0.0], 0.1)
    assert request.near_ties == [4, 6]


def test_a_window_in_company_fits_into_a_joint_pass() -> None:
    request = make_request([1, 2, 3], gamma=15, max_new_tokens=50)
    assert request.window_limit() == 15
    request.in_company_of(Joint(3))
    assert (request.window_limit(), request.window_limit(31), request.window_limit(2)) == (7, 7, 2)
    request.in_company_of(Joint(3, most_guesses=2))
    assert request.window_limit() == 2, "the pass would take too long"
    request.in_company_of(ALONE)
    assert request.window_limit() == 15


def test_a_window_is_never_longer_than_what_is_left_of_the_text() -> None:
    """A step commits one token more than it accepts, so that of five tokens four may be guessed, of one none."""
    request = make_request([1, 2, 3], gamma=3, max_new_tokens=5)
    assert (request.window_limit(), request.window_limit(31)) == (3, 4)
    request.commit([7, 7, 7], [1.0] * 3, 0.1)
    assert request.window_limit() == 1
    request.commit([7], [1.0], 0.1)
    assert request.window_limit() == 0
    request.commit([7], [1.0], 0.1)
    assert request.window_limit() == 0


def test_the_context_ends_a_text_that_may_be_longer() -> None:
    request = make_request([1, 2, 3], context=6, max_new_tokens=40)
    assert (request.max_tokens, request.window_limit()) == (6, 2)


def test_tokens_behind_the_end_never_were_text() -> None:
    """A step accepts 7, 8 and 9 and adds 5; the text ends with 8."""
    request = make_request([1, 2])
    request.commit([7, 8, 9, 5], [1.0, 0.0, 0.0, 1.0], 0.1)
    request.record(StepRecord(0.0, 1.0, 4, 3, "fresh", "serial", 1.0))
    request.end_after(2)
    assert request.tokens.tolist() == [1, 2, 7, 8]
    assert (request.near_ties, request.steps[-1].num_accepted) == ([3], 2)
    request.end_after(2)
    assert request.num_new == 2


def test_whoever_holds_the_request_can_cancel_it() -> None:
    request = make_request([1, 2])
    request.commit([7, 8], [1.0, 1.0], 0.1)
    request.raise_if_cancelled()
    request.cancel()
    assert request.is_cancelled()
    with pytest.raises(Cancelled, match="after 2 new tokens"):
        request.raise_if_cancelled()


def test_a_prompt_leaves_room_for_one_new_token_at_least() -> None:
    assert make_request([1] * 7, context=8).max_tokens == 8
    with pytest.raises(ContextLengthError, match=r"context length is 8 tokens.*the prompt has 8"):
        make_request([1] * 8, context=8)
    with pytest.raises(GenerationError, match="prompt is empty"):
        make_request([])


def test_a_token_cancels_every_request_that_has_it() -> None:
    token = CancelToken()
    first, second, other = make_request([1], cancel=token), make_request([1], cancel=token), make_request([1])
    assert not first.is_cancelled()
    token.cancel()
    for request in (first, second):
        with pytest.raises(Cancelled):
            request.raise_if_cancelled()
    other.raise_if_cancelled()


def test_a_request_whose_time_is_over_stops_and_is_told_from_a_cancelled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("mirrorsd.runtime.decoding.request.perf_counter", lambda: now)
    request = make_request([1], deadline_s=2.0)
    now = 101.9
    assert (request.is_cancelled(), request.is_overdue()) == (False, False)
    now = 102.1
    assert (request.is_cancelled(), request.is_overdue()) == (True, True)
    assert not make_request([1]).is_overdue()
    request.cancel()
    assert (request.is_cancelled(), request.is_overdue()) == (True, False)
