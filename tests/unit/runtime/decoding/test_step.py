"""Plain decoding, and the step that all methods share: verify, commit, record. How much of a window is right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.decoding.protocol import InFlight
from mirrorsd.runtime.decoding.request import Acceptance, Request, accept_window
from mirrorsd.runtime.sampling.chooser import Choice
from mirrorsd.texts.config import GenerationConfig

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5]


def counting(text: list[int]) -> np.ndarray:
    """A target whose next token is always one more than the last."""
    return np.eye(16)[(text[-1] + 1) % 16]


def start(bench: Any, prompt: list[int], **settings: Any) -> tuple[Any, InFlight]:
    request = Request(prompt, GenerationConfig(**settings), bench.speculation, bench.seat.context, bench.cancel)
    decoder = bench.seat.decoder(request, "plain")
    return decoder, decoder.start()


def test_every_pass_brings_one_token(make_bench: Make) -> None:
    bench = make_bench(target_handler=counting)
    assert bench.decode([3, 4], "plain", max_new_tokens=5) == [5, 6, 7, 8, 9]
    assert (bench.target.num_passes, bench.draft.num_passes) == (5, 0)


def test_a_step_verifies_the_window_that_is_in_flight(make_bench: Make) -> None:
    decoder, inflight = start(make_bench(target_handler=counting), [3, 4])
    assert (inflight.head, inflight.window.tolist()) == (1, [])
    outcome = decoder.step(inflight._replace(window=np.array([5, 6, 9])))
    assert (outcome.tokens, outcome.num_accepted, outcome.method) == ([5, 6, 7], 2, "plain")
    assert decoder.request.tokens.tolist() == [3, 4, 5, 6, 7]
    assert (outcome.inflight.head, outcome.inflight.window.tolist()) == (4, [])
    assert decoder.step(outcome.inflight).tokens == [8]


def test_every_step_is_recorded(make_bench: Make) -> None:
    decoder, inflight = start(make_bench(target_handler=counting), [3, 4])
    outcome = decoder.step(inflight._replace(window=np.array([5, 6, 9])))
    decoder.step(outcome.inflight)
    steps = decoder.request.steps
    assert [(step.num_window, step.num_accepted, step.next_source) for step in steps] == [
        (3, 2, "none"),
        (0, 0, "none"),
    ]
    assert decoder.request.ledger.prefilled <= steps[0].started <= steps[0].ended <= steps[1].started


@pytest.mark.parametrize(("queued_s", "own"), [(30.0, 2.0), (0.0, 37.0)], ids=["behind another's", "alone"])
def test_drafting_behind_anothers_pass_counts_as_queueing(make_bench: Make, queued_s: float, own: float) -> None:
    """The pass takes 2 s after 30 behind another's, drafting 5: the next pass would have to queue in that time, too.

    Alone, all 37 are the step's own.
    """
    decoder, inflight = start(make_bench(target_handler=counting), [3, 4])
    ledger, clock = decoder.request.ledger, [0.0]
    ledger.now = lambda: clock[0]
    result, find = decoder.target.result, decoder.source.next

    def late(request: Request, ticket: Any) -> Any:
        output = result(request, ticket)
        clock[0] += 30.0 + 2.0
        ticket.queued_s = queued_s
        return output

    def draft(*given: Any) -> Any:
        clock[0] += 5.0
        ledger.drafted_s += 5.0
        return find(*given)

    decoder.target.result, decoder.source.next = late, draft
    decoder.step(inflight)
    (step,) = decoder.request.steps
    assert (step.ended - step.started, step.own_seconds) == (37.0, own)
    assert ledger.queued_s == 37.0 - own


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.7}, {"temperature": 2.0, "seed": 1}]
)
def test_a_window_is_judged_by_the_choices_of_one_token_at_a_time(make_bench: Make, settings: dict[str, Any]) -> None:
    """Noise and penalty of a row are those of its own place and of the window's tokens before it."""
    bench = make_bench()
    expected = bench.decode(PROMPT, "plain", max_new_tokens=12, **settings)
    decoder, inflight = start(bench, PROMPT, **settings)
    first = decoder.step(inflight._replace(window=np.array(expected[:4])))
    assert (first.tokens, first.num_accepted) == (expected[:5], 4)
    half_wrong = np.array([expected[5], (expected[6] + 1) % 16, expected[7]])
    second = decoder.step(first.inflight._replace(window=half_wrong))
    assert (second.tokens, second.num_accepted) == (expected[5:7], 1)


def test_a_choice_as_good_as_its_runner_up_is_a_near_tie(make_bench: Make) -> None:
    def tied_once(text: list[int]) -> np.ndarray:
        return np.ones(16) if len(text) == 4 else counting(text)

    bench = make_bench(target_handler=tied_once)
    bench.decode([3, 4], "plain", max_new_tokens=6)
    assert bench.last_request.near_ties == [4]


def accept(window: list[int], choices: list[int], asked: list[int] | None = None) -> Acceptance:
    """The target chooses `choices`, each a tenth further ahead of its runner-up than the one before."""

    def choose_row(row: int) -> Choice:
        if asked is not None:
            asked.append(row)
        return Choice(choices[row], (row + 1) / 10)

    return accept_window(np.array(window, dtype=np.int64), choose_row)


@pytest.mark.parametrize(
    ("window", "choices", "num_accepted", "next_token"),
    [
        ([4, 5, 9], [4, 5, 6, 7], 2, 6),
        ([9, 5, 6], [4, 5, 6, 7], 0, 4),
        ([4, 9, 6], [4, 5, 6, 7], 1, 5),
        ([4, 5, 6], [4, 5, 6, 7], 3, 7),
        ([0, 0], [0, 0, 0], 2, 0),
        ([], [4], 0, 4),
    ],
    ids=["correction", "nothing right", "right again later", "bonus", "token zero", "no window"],
)
def test_a_window_counts_up_to_its_first_difference(
    window: list[int], choices: list[int], num_accepted: int, next_token: int
) -> None:
    assert accept(window, choices)[:2] == (num_accepted, next_token)


def test_rows_behind_the_first_difference_are_never_asked() -> None:
    asked: list[int] = []
    accept([4, 9, 6, 7], [4, 5], asked)
    assert asked == [0, 1]


def test_every_committed_token_has_its_gap() -> None:
    assert accept([4, 5, 9], [4, 5, 6, 7]).gaps == (0.1, 0.2, 0.3)
    assert accept([4, 5, 6], [4, 5, 6, 7]).gaps == (0.1, 0.2, 0.3, 0.4)


def test_what_is_committed_is_what_the_target_alone_would_have_said() -> None:
    """Whatever the window: accepted tokens and the next one are a beginning of the target's choices."""
    random = np.random.default_rng(2)
    for _ in range(300):
        choices = random.integers(0, 3, 6).tolist()
        window = random.integers(0, 3, 5).tolist()
        found = accept(window, choices)
        assert [*window[: found.num_accepted], found.next_token] == choices[: found.num_accepted + 1]
        assert found.num_accepted == 5 or window[found.num_accepted] != found.next_token
