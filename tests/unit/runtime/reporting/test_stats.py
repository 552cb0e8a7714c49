"""What statistics count: the tokens that were returned, from the end of the target's prefill on."""

import doctest
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mirrorsd.runtime.decoding import request
from mirrorsd.runtime.decoding.protocol import Stop
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import run_steps
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.stats import GenerationStats, summarise
from mirrorsd.testing.fake import FakeDraft, FakeTarget
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig
from mirrorsd.texts.shown_text import StopWatch

from ..conftest import VOCAB, Bench, SteadyTarget, greedy_continuation, make_draft_handler  # noqa: TID252 - the fakes of all rooms

PROMPT = [3, 1, 4, 1, 5]
METHODS = ("plain", "serial", "mirror", "auto")
NUM_TOKENS = 40


class Letters:
    """A decoder whose token 0 is `a`, 1 is `b`, and so on."""

    mark = ""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def finish(self) -> str:
        return ""


def follow(bench: Bench, method: str, eos_ids: tuple[int, ...] = (), **settings: Any) -> tuple[Stop, Request]:
    """Decode as a session does, to the end of the text."""
    config = GenerationConfig(method=method, max_new_tokens=NUM_TOKENS, **settings)
    made = Request(PROMPT, config, bench.speculation, bench.seat.context, bench.cancel)
    if isinstance(bench.target, SteadyTarget):
        made.ledger.now = lambda: bench.target.seconds
    decoder = bench.seat.decoder(made, method)
    try:
        *_, last = run_steps(decoder, StopWatch(config, eos_ids, Letters()))
    finally:
        decoder.close()
    assert isinstance(last, Stop)
    return last, made


def first_places() -> dict[int, int]:
    """Every token of the text, and where it stands first: each can be the end of the text."""
    text = greedy_continuation(PROMPT, NUM_TOKENS)
    return {token: text.index(token) for token in text}


def counts_what_was_returned(stop: Stop, stats: GenerationStats) -> bool:
    return round(stats.tokens_per_step * stats.steps) == len(stop.token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_behind_an_end_inside_a_window_count_nowhere(make_bench: Callable[..., Bench], method: str) -> None:
    num_cut = 0
    for eos_id, place in first_places().items():
        stop, made = follow(make_bench(hit_rate=1.0, gamma=6), method, (eos_id,))
        stats = summarise(made, 0.0, made.steps[-1].ended)
        assert (stop.reason, len(stop.token_ids)) == ("eos", place + 1)
        assert counts_what_was_returned(stop, stats)
        # Every step adds what it accepted and a token of the target's own, which the last one's cut takes away first.
        num_own = len(stop.token_ids) - round(stats.mean_accepted * stats.steps)
        assert num_own in (stats.steps - 1, stats.steps)
        num_cut += num_own == stats.steps - 1
    # `auto` drafts when it knows what plain decoding takes: by then, most of these texts are over.
    assert num_cut == 0 if method == "plain" else num_cut > 2 or method == "auto"


@pytest.mark.parametrize("method", METHODS)
def test_tokens_behind_a_stop_string_count_nowhere(make_bench: Callable[..., Bench], method: str) -> None:
    text = "".join(chr(ord("a") + token) for token in greedy_continuation(PROMPT, NUM_TOKENS))
    for start in range(2, 9):
        stop_string = text[start : start + 3]
        stop, made = follow(make_bench(hit_rate=1.0, gamma=6), method, stop_strings=(stop_string,))
        stats = summarise(made, 0.0, made.steps[-1].ended)
        assert (stop.reason, len(stop.token_ids)) == ("stop_string", text.index(stop_string) + 3)
        assert counts_what_was_returned(stop, stats)


@pytest.mark.parametrize("method", ["serial", "mirror"])
def test_a_near_tie_behind_the_end_is_none_of_the_text(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(FakeTarget, "near_tie_gap", 100.0)  # every token is one
    for eos_id, place in first_places().items():
        _, made = follow(make_bench(hit_rate=1.0, gamma=6), method, (eos_id,))
        stats = summarise(made, 0.0, made.steps[-1].ended)
        assert stats.near_tie_positions == list(range(len(PROMPT), len(PROMPT) + place + 1))


def test_a_text_of_the_full_length_is_not_cut(make_bench: Callable[..., Bench]) -> None:
    stop, made = follow(make_bench(hit_rate=0.7, gamma=6), "serial")
    accepted = sum(step.num_accepted for step in made.steps)
    assert (stop.reason, len(stop.token_ids)) == ("length", NUM_TOKENS)
    assert accepted + len(made.steps) == made.num_new == NUM_TOKENS


class TimedDraft(FakeDraft):
    """Every round takes three seconds of the target's clock."""

    target: Any

    def run(self, *arguments: Any) -> Any:
        self.target.seconds += 3.0
        return super().run(*arguments)


@pytest.mark.parametrize("method", METHODS)
def test_the_clock_starts_where_the_target_has_read_the_prompt(make_bench: Callable[..., Bench], method: str) -> None:
    draft = TimedDraft(make_draft_handler(1.0, 3), vocab_size=VOCAB, num_streams=3)
    bench = make_bench(draft=draft, is_steady=True, takes_turns=True, gamma=6)
    draft.target = bench.target
    stop, made = follow(bench, method)
    stats = summarise(made, 0.0, made.steps[-1].ended)
    # Prefill takes no time here, and the devices take turns: the clock shows decoding alone, first window included.
    assert bench.target.seconds == made.steps[-1].ended > 0
    assert stats.prefill_ms == 0.0
    assert stats.tokens_per_second == pytest.approx(len(stop.token_ids) / made.steps[-1].ended)
    assert stats.time_to_first_token_ms == 1e3 * made.steps[0].ended
    drafted_first = made.steps[0].started
    assert drafted_first == 0.0 if method in ("plain", "auto") else drafted_first >= 3.0
    assert stats.draft_exposed_ms * stats.steps >= 1e3 * drafted_first


def test_the_prompt_is_left_out_of_the_speed(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(is_steady=True)
    prefill = bench.target.prefill

    def slow_prefill(*arguments: Any, **options: Any) -> None:
        bench.target.seconds += 50.0
        prefill(*arguments, **options)

    bench.target.prefill = slow_prefill
    stop, made = follow(bench, "plain")
    stats = summarise(made, 0.0, made.steps[-1].ended)
    assert (stats.prefill_ms, stats.time_to_first_token_ms) == (50e3, 51e3)
    assert stats.tokens_per_second == pytest.approx(1.0)
    assert (stats.num_prompt_tokens, len(stop.token_ids)) == (len(PROMPT), NUM_TOKENS)


def test_worked_examples() -> None:
    assert doctest.testmod(request).failed == 0


def test_one_line_for_people_says_how_fast_how_right_and_why_it_ended(make_bench: Callable[..., Bench]) -> None:
    stop, made = follow(make_bench(hit_rate=0.7, gamma=6), "serial")
    made.ledger.prefilled = 0.25
    stats = summarise(
        made, 0.0, made.steps[-1].ended, stop_reason=stop.reason, plain_tokens_per_second=half_as_fast(made)
    )
    assert stats.draft_right == sum(step.num_accepted for step in made.steps) / stats.num_drafted
    assert str(stats) == (
        f"{NUM_TOKENS} tokens, {stats.tokens_per_second:.1f} tokens/s, 2.0 times plain | "
        f"draft right {stats.draft_right:.0%} | prompt {len(PROMPT)} tokens in 0.25 s | "
        "ended: cut off at max_new_tokens"
    )


def test_what_nobody_measured_is_left_out_of_the_line(make_bench: Callable[..., Bench]) -> None:
    _, made = follow(make_bench(hit_rate=0.7, gamma=6), "plain")
    stats = summarise(made, 0.0, made.steps[-1].ended, plain_tokens_per_second=1.0)
    assert stats.times_plain is None, "all of it was plain decoding"
    assert stats.draft_right is None
    assert "plain" not in str(stats)
    assert "ended" not in str(stats)


def test_a_text_with_plain_steps_is_held_against_them_and_not_against_another_moment() -> None:
    """Nine plain steps of 10 ms, one beside which the target waited 40 ms for a draft, a window of 3 in 20 ms."""
    made = Request(PROMPT, GenerationConfig(max_new_tokens=64), SpeculationConfig(), 64, threading.Event())
    made.ledger.prefilled, now = 1.0, 1.0
    for number in range(10):
        seconds = 0.05 if number == 4 else 0.01
        made.steps.append(StepRecord(now, now + seconds, 0, 0, "none", "plain", seconds))
        if number == 4:
            made.ledger.spans.append(Span("host", "exposed", now + 0.01, now + seconds))
        now += seconds
    made.steps.append(StepRecord(now, now + 0.02, 3, 2, "fresh", "serial", 0.02))
    made.ledger.spans.append(Span("host", "exposed", now, now + 0.005))
    stats = summarise(made, 0.0, now + 0.02, plain_tokens_per_second=1.0)
    assert stats.plain_tokens_per_second == pytest.approx(100.0)
    del made.steps[:3]
    assert summarise(made, 0.0, now + 0.02, plain_tokens_per_second=1.0).plain_tokens_per_second == 1.0, "too few"


@pytest.mark.parametrize(
    ("num_plain", "num_accepted", "is_plain"),
    [(9, 0, True), (8, 0, False), (18, 1, True), (17, 1, False), (99, 8, True), (0, 3, False)],
)
def test_a_text_that_came_one_by_one_is_not_compared_with_plain_decoding(
    num_plain: int, num_accepted: int, is_plain: bool
) -> None:
    """Nine tenths of the tokens, those of the trial's step included, are where a text counts as plain decoding's."""
    made = Request(PROMPT, GenerationConfig(max_new_tokens=128), SpeculationConfig(), 64, threading.Event())
    made.ledger.prefilled = 1.0
    for number in range(num_plain):
        made.steps.append(StepRecord(1.0 + number, 2.0 + number, 0, 0, "none", "plain", 1.0))
    now = 1.0 + num_plain
    made.steps.append(StepRecord(now, now + 1.0, num_accepted + 1, num_accepted, "fresh", "serial", 1.0))
    made._text.num_tokens += num_plain + 1 + num_accepted
    stats = summarise(made, 0.0, now + 1.0, plain_tokens_per_second=1.0)
    assert round(stats.tokens_per_step * stats.steps) == num_plain + 1 + num_accepted
    assert (stats.times_plain is None) == is_plain
    assert ("times plain" in str(stats)) == (not is_plain)


def half_as_fast(made: Request) -> float:
    return summarise(made, 0.0, made.steps[-1].ended).tokens_per_second / 2
