"""What an answer tells of its speed: a token is counted where it was made, and a guess where it was verified."""

from types import SimpleNamespace
from typing import Any

from mirrorsd.runtime.decoding.request import REPLAY, StepRecord
from mirrorsd.server.answers.figures import timings
from mirrorsd.server.metrics import Metrics


def result(*steps: StepRecord) -> Any:
    stats = SimpleNamespace(
        num_reused_tokens=3, num_prompt_tokens=5, prefill_ms=100.0, seconds=0.6, time_to_first_token_ms=150.0
    )
    return SimpleNamespace(stats=stats, num_tokens=sum(1 + step.num_accepted for step in steps), steps=list(steps))


def step(method: str, num_window: int, num_accepted: int, **more: int) -> StepRecord:
    return StepRecord(0.0, 0.1, num_window, num_accepted, "none", method, 0.1, **more)


def test_what_another_server_wrote_was_read_here() -> None:
    """Twenty ids came with the request, and were replayed within the time of the prompt."""
    text = result(step(REPLAY, 19, 19), step("plain", 0, 0), step("serial", 4, 3))
    told = timings([text])
    assert (told["prompt_n"], told["prompt_ms"], told["cache_n"]) == (5 - 3 + 20, 100.0, 3)
    assert (told["predicted_n"], told["predicted_ms"], told["predicted_per_second"]) == (5, 500.0, 10.0)
    assert counted(text)["mirrorsd_generation_tokens_total"] == 5


def test_guesses_beside_a_window_were_verified_too() -> None:
    text = result(step("serial", 4, 3, num_siblings=8, num_aside=1), step("serial", 2, 0))
    told = timings([text])
    assert (told["draft_n"], told["draft_n_accepted"]) == (4 + 8 + 2, 3)
    found = counted(text)
    assert (found["mirrorsd_spec_decode_num_draft_tokens_total"]) == 14
    assert (found["mirrorsd_spec_decode_num_accepted_tokens_total"]) == 3


def counted(text: Any) -> dict[str, float]:
    metrics = Metrics(lambda: 0, lambda: 0)
    metrics.observe_results("m", [text])
    return {name: value for name, _, value in metrics.samples()}
