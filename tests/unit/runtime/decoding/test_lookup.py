"""Texts that repeat themselves: what follows, how likely, and what windows without a draft bring."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.decoding.step import FreeRows
from mirrorsd.runtime.ledger import ALONE, Joint
from mirrorsd.testing.fake import FakeDraft

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5]
LOOP = [5, 6, 7, 8, 9]


def _loop(text: list[int]) -> np.ndarray:
    """A model that repeats its last six tokens for ever."""
    return np.eye(16)[text[-6]] if len(text) >= 6 else np.eye(16)[len(text)]


def _dear(bench: Any, text: list[int]) -> list[int]:
    """A draft that is wrong, and takes as long as fifty passes."""
    bench.target.seconds += 50.0
    return [3, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_a_free_row_brings_tokens_and_changes_none(make_bench: Make, temperature: float) -> None:
    """Without a draft that is any good, a text that repeats itself takes little more than half the passes."""
    sampling = {"do_sample": True, "temperature": temperature, "seed": 5} if temperature else {}
    num_passes = {}
    for row_group in (1, 2):
        draft = FakeDraft(lambda text: [3, 0, 0, 0], vocab_size=16, num_streams=3)
        bench = make_bench(draft=draft, target_handler=_loop, is_steady=True)
        draft._handler = partial(_dear, bench)
        bench.seat.target.row_group = row_group
        expected = bench.decode(PROMPT, "plain", max_new_tokens=100, **sampling)
        assert bench.last_request.chooser.is_sampling == bool(temperature)
        num_plain, bench.target.num_passes = bench.target.num_passes, 0
        assert bench.decode(PROMPT, "auto", max_new_tokens=100, **sampling) == expected
        num_passes[row_group] = bench.target.num_passes
    assert num_plain >= 100
    assert num_passes[1] > 90
    assert num_passes[2] < 70


def test_in_company_no_row_is_free() -> None:
    """Other conversations fill a group up."""
    repeats = SimpleNamespace(window=lambda count: np.arange(count))
    request: Any = SimpleNamespace(repeats=repeats, window_limit=lambda: 5, joint=ALONE)
    source = FreeRows(request, 2)
    assert source.guess().tolist() == [0]
    request.joint = Joint(3)
    assert source.guess().tolist() == []


def test_a_prediction_brings_tokens_and_changes_none(make_bench: Make) -> None:
    """A text that never repeats itself takes half the passes where it was predicted, and no more where wrongly so."""
    written = np.random.default_rng(3).integers(1, 16, 200)
    num_passes = {}
    for name, prediction in {"none": (), "right": tuple(written[:120].tolist()), "wrong": (7, 8) * 40}.items():
        bench = make_bench(hit_rate=0.0, target_handler=lambda text: np.eye(16)[written[len(text)]])
        bench.seat.target.row_group = 2
        expected = bench.decode(PROMPT, "plain", max_new_tokens=100)
        bench.target.num_passes = 0
        assert bench.decode(PROMPT, "auto", max_new_tokens=100, prediction=prediction) == expected
        num_passes[name] = bench.target.num_passes
    assert num_passes["right"] < 0.75 * num_passes["none"]
    assert num_passes["wrong"] <= 1.1 * num_passes["none"]


def test_a_last_token_needs_no_guess(make_bench: Make) -> None:
    bench = make_bench(hit_rate=0.0, target_handler=_loop)
    bench.seat.target.row_group = 2
    expected = bench.decode(PROMPT, "plain", max_new_tokens=7)
    assert bench.decode(PROMPT, "auto", max_new_tokens=7) == expected
    assert len(bench.last_request.tokens) == len(PROMPT) + 7


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.05, "seed": 5}])
@pytest.mark.parametrize("handler", [_loop, None])
def test_lookup_by_itself_changes_no_token_and_saves_passes_where_a_text_repeats_itself(
    make_bench: Make, sampling: dict[str, Any], handler: Any
) -> None:
    bench = make_bench(hit_rate=0.0, **({"target_handler": handler} if handler else {}))
    expected = bench.decode(PROMPT, "plain", max_new_tokens=100, **sampling)
    num_drafted = bench.draft.num_passes
    bench.target.num_passes = 0
    assert bench.decode(PROMPT, "lookup", max_new_tokens=100, **sampling) == expected
    assert bench.draft.num_passes == num_drafted, "no draft is asked"
    assert bench.target.num_passes < (25 if handler else 100)
    assert {step.method for step in bench.last_request.steps} == {"lookup"}
    assert {step.next_source for step in bench.last_request.steps} <= {"text", "none"}


def test_lookup_verifies_less_where_rows_are_known_to_cost_much(make_bench: Make) -> None:
    """A pass of n rows takes n times as long: a token that is not sure costs more than it brings."""
    bench = make_bench(hit_rate=0.0)
    bench.engine.known.target_ms = ((1.0, 1.0), (32.0, 32.0))
    expected = bench.decode(PROMPT, "plain", max_new_tokens=100)
    assert bench.decode(PROMPT, "lookup", max_new_tokens=100) == expected
    assert np.mean([step.num_window for step in bench.last_request.steps]) < 0.5


def cycle(text: list[int]) -> np.ndarray:
    """A model that says `LOOP` over and over."""
    logits = np.zeros(16)
    logits[LOOP[(LOOP.index(text[-1]) + 1) % len(LOOP)] if text[-1] in LOOP else LOOP[0]] = 9.0
    return logits


@pytest.mark.parametrize("method", ["serial", "mirror"])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_auto_takes_windows_from_a_text_that_repeats_itself(
    make_bench: Make, method: str, temperature: float | None
) -> None:
    """The same text as plain decoding's in far fewer steps; the methods by themselves take all from the draft."""
    settings = {"max_new_tokens": 240, "temperature": temperature, "seed": 3 if temperature else None}
    expected = make_bench(target_handler=cycle).decode([1, 2, 3, 4, *LOOP], "plain", **settings)
    sources = []
    for name in (method, "auto"):
        bench = make_bench(target_handler=cycle, hit_rate=0.5, gamma=8, is_steady=True)
        bench.engine.known.target_ms = ((1.0, 1000.0), (33.0, 1001.0))
        bench.engine.known.pairs[temperature is not None].method = method
        assert bench.decode([1, 2, 3, 4, *LOOP], name, **settings) == expected
        sources.append(Counter(step.next_source for step in bench.last_request.steps))
    by_itself, in_auto = sources
    assert by_itself["text"] == 0
    assert in_auto["text"] > 3
    assert in_auto.total() < by_itself.total() / 2


@pytest.mark.parametrize("method", ["serial", "mirror"])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_a_drafts_guesses_lean_on_the_text_unless_told_not_to(
    make_bench: Make, method: str, temperature: float | None
) -> None:
    """A draft that is always wrong after one token of a loop: what came there before is guessed instead."""
    settings = {"max_new_tokens": 120, "temperature": temperature, "seed": 3 if temperature else None}
    expected = make_bench(target_handler=cycle).decode([1, 2, 3, 4, *LOOP], "plain", **settings)
    num_steps = {}

    def ahead(seen: list[int]) -> list[int]:
        first = LOOP.index(seen[-1]) if seen[-1] in LOOP else -1
        return [15 if (first + i) % len(LOOP) == 1 else LOOP[(first + 1 + i) % len(LOOP)] for i in range(4)]

    for repeats in (True, False):
        draft = FakeDraft(ahead, vocab_size=16, num_streams=3)
        bench = make_bench(target_handler=cycle, draft=draft, gamma=6, passes=2, repeats=repeats, is_steady=True)
        assert bench.decode([1, 2, 3, 4, *LOOP], method, **settings) == expected
        num_steps[repeats] = len(bench.last_request.steps)
    assert num_steps[True] < 0.8 * num_steps[False]
