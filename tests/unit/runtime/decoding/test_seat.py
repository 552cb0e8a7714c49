"""Each method as it is put together, over scripted models: whatever the draft does, the text is the target's."""

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from mirrorsd.graphs.errors import Cancelled, ContextLengthError, DeviceError, GenerationError
from mirrorsd.testing.fake import FakeDraft

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
METHODS = ["plain", "serial", "mirror", "auto"]
Make = Callable[..., Any]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("streams", [0, 1, 3])
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.8, 1.0])
def test_greedy_text_is_plain_text(make_bench: Make, method: str, streams: int, hit_rate: float) -> None:
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=60)
    bench = make_bench(hit_rate=hit_rate, streams=streams)
    assert bench.decode(PROMPT, method, max_new_tokens=60) == expected


@pytest.mark.parametrize("allocation", ["global", "per_row"])
@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize("roots", [0, 1, 4, 20])
@pytest.mark.parametrize("root_source", ["proxy", "early", "progressive"])
def test_every_shape_of_speculation_gives_the_same_text(
    make_bench: Make, root_source: str, allocation: str, gamma: int, roots: int
) -> None:
    expected = make_bench().decode(PROMPT, "plain")
    settings = {"allocation": allocation, "gamma": gamma, "roots": roots, "root_source": root_source}
    bench = make_bench(hit_rate=0.7, kappa=3, passes=3, suffix_seconds=0.0005, **settings)
    assert bench.decode(PROMPT, "mirror") == expected


def test_a_perfect_draft_fills_every_window(make_bench: Make) -> None:
    bench = make_bench(hit_rate=1.0, gamma=6, passes=3)
    bench.decode(PROMPT, "serial", max_new_tokens=70)
    assert [step.num_accepted for step in bench.last_request.steps] == [6] * 10
    assert bench.target.num_passes == 10


def test_a_hopeless_draft_still_gives_one_token_per_step(make_bench: Make) -> None:
    bench = make_bench(hit_rate=0.0)
    bench.decode(PROMPT, "mirror", max_new_tokens=20)
    assert {step.num_accepted for step in bench.last_request.steps} == {0}


@pytest.mark.parametrize(("root_source", "sources"), [("proxy", {"exit"}), ("progressive", {"early", "exit"})])
def test_exact_exit_makes_every_window_a_reuse(
    make_bench: Make, confident_exit: Make, root_source: str, sources: set[str]
) -> None:
    """An exit that tells the truth puts the correction among the roots, and there is time to prepare them."""
    bench = make_bench(hit_rate=0.6, roots=8, is_steady=True, exit_handler=confident_exit, root_source=root_source)
    bench.decode(PROMPT, "mirror", max_new_tokens=60)
    steps = bench.last_request.steps
    assert {step.next_source for step in steps[:-1]} == sources
    assert steps[-1].next_source == "none"
    assert len(steps) > 10


def test_wrong_exit_falls_back(make_bench: Make) -> None:
    def wrong_exit(text: list[int]) -> np.ndarray:
        logits = np.zeros(VOCAB)
        logits[(sum(text) % 4) + 12] = 5.0
        return logits

    expected = make_bench().decode(PROMPT, "plain")
    bench = make_bench(hit_rate=0.6, exit_handler=wrong_exit, roots=1, suffix_seconds=0.005)
    assert bench.decode(PROMPT, "mirror") == expected
    assert "fresh" in {step.next_source for step in bench.last_request.steps}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_seed_gives_the_same_text_whatever_the_method(make_bench: Make, method: str, seed: int) -> None:
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": seed, "max_new_tokens": 60}
    expected = make_bench().decode(PROMPT, "plain", **settings)
    assert make_bench(hit_rate=0.8).decode(PROMPT, method, **settings) == expected


def test_repetition_penalty_counts_the_window_before_the_row(make_bench: Make) -> None:
    settings = {"repetition_penalty": 1.7, "max_new_tokens": 60}
    expected = make_bench().decode(PROMPT, "plain", **settings)
    assert expected != make_bench().decode(PROMPT, "plain", max_new_tokens=60)
    for method in ("serial", "mirror"):
        assert make_bench(hit_rate=1.0).decode(PROMPT, method, **settings) == expected


@pytest.mark.parametrize("method", ["serial", "mirror"])
def test_nothing_accepted_is_drafted_twice(make_bench: Make, method: str) -> None:
    """Each row of the final text is fed to the draft once: caches are moved, never recomputed."""
    bench = make_bench(hit_rate=1.0, roots=1, gamma=6, passes=2)
    text = PROMPT + bench.decode(PROMPT, method, max_new_tokens=60)
    fed = bench.draft.texts_fed
    assert [size for size in range(1, len(text) - 8) if fed.count(text[:size]) != 1] == []


def test_common_prefix_of_the_next_request_is_reused(make_bench: Make) -> None:
    bench = make_bench()
    new = bench.decode(PROMPT, "mirror", max_new_tokens=20)
    bench.draft.texts_fed.clear()
    longer = [*PROMPT, *new[:15], 7, 7, 7]
    expected = make_bench().decode(longer, "plain")
    assert bench.decode(longer, "mirror") == expected
    assert bench.last_request.num_reused == len(PROMPT) + 15
    assert min(len(text) for text in bench.draft.texts_fed) >= len(PROMPT) + 10


def test_shorter_second_prompt_rolls_back(make_bench: Make) -> None:
    bench = make_bench()
    bench.decode(PROMPT, "mirror", max_new_tokens=30)
    expected = make_bench().decode(PROMPT[:4], "plain")
    assert bench.decode(PROMPT[:4], "mirror") == expected


@pytest.mark.parametrize("method", METHODS)
def test_generation_ends_at_the_context(make_bench: Make, method: str) -> None:
    expected = make_bench(context=40).decode(PROMPT, "plain", max_new_tokens=500)
    assert len(expected) == 40 - len(PROMPT)
    assert make_bench(context=40, hit_rate=0.9).decode(PROMPT, method, max_new_tokens=500) == expected


def test_a_short_text_goes_with_the_first_round(make_bench: Make) -> None:
    """What the draft has not seen yet, up to a round's rows, costs no pass of its own: one for the first window."""
    bench = make_bench(hit_rate=0.0, passes=1)
    bench.decode(PROMPT, "serial", max_new_tokens=2)
    assert (bench.draft.num_passes, bench.draft.texts_fed[len(PROMPT) - 1]) == (1, PROMPT)


def test_long_prompt_is_prefilled_in_chunks(make_bench: Make) -> None:
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 150)]
    expected = make_bench().decode(prompt, "plain")
    assert make_bench(prefill_rows=32).decode(prompt, "mirror") == expected


def test_prompt_limits(make_bench: Make) -> None:
    with pytest.raises(ContextLengthError, match=r"context length is 256 tokens.*has 300.*--context"):
        make_bench().decode([1] * 300, "plain")
    with pytest.raises(GenerationError, match="prompt is empty"):
        make_bench().decode([], "plain")


def failing_draft(failure: Callable[[], list[int]], after: int, capacity: int = 256) -> FakeDraft:
    calls = {"count": 0}

    def handler(text: list[int]) -> list[int]:
        calls["count"] += 1
        return failure() if calls["count"] > after else [0, 0, 0, 0]

    return FakeDraft(handler, vocab_size=VOCAB, num_streams=3, capacity=capacity)


def _raise() -> list[int]:
    raise RuntimeError("the device fell off the bus")


# `auto` hardly asks a draft that is never right: it would not notice that it fails later.
@pytest.mark.parametrize(("method", "after"), [*product(["serial", "mirror"], [0, 1, 9, 30]), ("auto", 0), ("auto", 1)])
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (_raise, "RuntimeError: the device fell off the bus"),
        (lambda: [99, -1, 0, 0], "token ids outside 0 .. 15"),
    ],
)
def test_a_draft_that_fails_changes_no_token(
    make_bench: Make, method: str, after: int, failure: Callable[[], list[int]], cause: str
) -> None:
    expected = make_bench().decode(PROMPT, "plain")
    bench = make_bench(draft=failing_draft(failure, after), is_steady=True)
    with pytest.warns(RuntimeWarning, match=f"The draft failed.*{cause}.*decoded plainly"):
        assert bench.decode(PROMPT, method) == expected


@pytest.mark.parametrize("method", ["serial", "mirror"])
def test_a_draft_that_hangs_is_given_up(make_bench: Make, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 0.05)
    release = threading.Event()

    def hang() -> list[int]:
        release.wait()
        return [0, 0, 0, 0]

    expected = make_bench().decode(PROMPT, "plain")
    bench = make_bench(draft=failing_draft(hang, 6), draft_deadline_s=0.2)
    try:
        with pytest.warns(RuntimeWarning, match=r"did not answer within 0.2 s"):
            assert bench.decode(PROMPT, method) == expected
        with pytest.warns(RuntimeWarning, match="still hung"):
            assert bench.decode(PROMPT, method) == expected
    finally:
        release.set()


def test_a_draft_that_recovers_is_used_again(make_bench: Make) -> None:
    is_broken = {"now": True}

    def handler(text: list[int]) -> list[int]:
        if is_broken["now"]:
            raise RuntimeError("not yet")
        return [1, 1, 1, 1]

    bench = make_bench(draft=FakeDraft(handler, vocab_size=VOCAB, num_streams=3))
    with pytest.warns(RuntimeWarning, match="not yet"):
        expected = bench.decode(PROMPT, "mirror")
    is_broken["now"] = False
    assert bench.decode(PROMPT, "mirror") == expected
    assert any(step.num_window for step in bench.last_request.steps)


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_a_failure_is_told_of_the_text_that_had_it(make_bench: Make, method: str) -> None:
    bench = make_bench(draft=failing_draft(_raise, 0))
    with pytest.warns(RuntimeWarning, match="The draft failed"):
        expected = bench.decode(PROMPT, "serial")
    assert bench.seat.draft_failure == "RuntimeError: the device fell off the bus"
    assert bench.decode(PROMPT, method) == expected
    assert bench.seat.draft_failure is None


@pytest.mark.parametrize("name", ["target", "draft"])
def test_no_step_is_begun_where_a_device_is_just_given_a_job(make_bench: Make, name: str) -> None:
    bench = make_bench()
    with getattr(bench.engine, f"{name}_worker").jobs.lock, pytest.raises(GenerationError, match=f"The {name} is in"):
        bench.seat.check_reachable()
    bench.seat.check_reachable()


def test_a_slow_draft_only_costs_time(make_bench: Make) -> None:
    def slow(text: list[int]) -> list[int]:
        time.sleep(0.002)
        return [5, 5, 5, 5]

    expected = make_bench().decode(PROMPT, "plain")
    bench = make_bench(draft=FakeDraft(slow, vocab_size=VOCAB, num_streams=3))
    assert bench.decode(PROMPT, "mirror") == expected


def test_cancel_stops_within_a_step_and_leaves_the_engine_usable(make_bench: Make) -> None:
    bench = make_bench()
    expected = bench.decode(PROMPT, "plain")
    bench.cancel.set()
    with pytest.raises(Cancelled):
        bench.decode(PROMPT, "mirror")
    bench.cancel.clear()
    assert bench.decode(PROMPT, "mirror") == expected


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_follow_the_targets_law(make_bench: Make, method: str) -> None:
    """Chi-square of the first new token over seeds, against the target's own softmax, end to end.

    The text after the prompt has the same law at every position of this target, so all positions are counted.
    """
    logits = np.array([1.5, 0.3, -0.7, 0.0, 0.9, -2.0, 0.5, 1.0])
    expected = np.exp(logits) / np.exp(logits).sum()
    draft = FakeDraft(lambda text: [text[-1] % 8, 0, 4, 7], vocab_size=8, num_streams=3)
    bench = make_bench(target_handler=lambda text: logits, vocab=8, draft=draft)
    counts = np.zeros(8)
    for seed in range(40):
        tokens = bench.decode([1, 2, 3], method, temperature=1.0, seed=seed, max_new_tokens=50)
        counts += np.bincount(tokens, minlength=8)
    total = counts.sum()
    statistic = ((counts - total * expected) ** 2 / (total * expected)).sum()
    critical_at_1_percent_7_degrees = 18.475
    assert statistic < critical_at_1_percent_7_degrees


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "top_p": 0.9, "seed": 1}]
)
def test_a_target_that_overflows_is_a_device_error_and_no_text(
    make_bench: Make, scripted: Make, method: str, sampling: dict[str, Any]
) -> None:
    def overflowing(text: list[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan) if len(text) > 20 else scripted(text)

    bench = make_bench(target_handler=overflowing, exit_handler=scripted)
    with pytest.raises(DeviceError, match="NaN or infinite logits for position 21"):
        bench.decode(PROMPT, method, max_new_tokens=40, **sampling)
