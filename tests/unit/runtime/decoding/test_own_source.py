"""The guide "adding a source of windows", done on a toy: one class, one decoder, and the text is plain decoding's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.protocol import Found, InFlight, ReadPrompt
from mirrorsd.runtime.decoding.request import Acceptance, Request, StepRecord
from mirrorsd.runtime.decoding.step import StepDecoder
from mirrorsd.texts.config import GenerationConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Stutter:
    """Guesses that the last token comes again, twice."""

    name = "stutter"

    def __init__(self, request: Request) -> None:
        self.request, self.num_observed, self.is_closed = request, 0, False

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self.window()

    def begin(self, inflight: InFlight) -> None: ...

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        return Found(self.window(), "text")

    def window(self) -> NDArray[np.int64]:
        return np.repeat(self.request.tokens[-1:], min(2, self.request.window_limit()))

    def observe(self, step: StepRecord) -> None:
        self.num_observed += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("handler", ["scripted", "stuttering"])
def test_a_source_of_ones_own_changes_no_token(
    make_bench: Callable[..., Any], handler: str, way: dict[str, Any]
) -> None:
    models = {} if handler == "scripted" else {"target_handler": lambda text: 9.0 * np.eye(16)[len(text) // 5 % 16]}
    bench = make_bench(**models)
    expected = bench.decode(PROMPT, "plain", **way)
    request = Request(
        PROMPT, GenerationConfig(max_new_tokens=40, **way), bench.speculation, bench.seat.context, bench.cancel
    )
    source = Stutter(request)
    decoder = StepDecoder(request, bench.seat.target, source, source.name)
    inflight = decoder.start()
    while request.num_tokens < request.max_tokens:
        inflight = decoder.step(inflight).inflight
    decoder.close()
    assert request.tokens[request.num_prompt :].tolist() == expected
    assert source.is_closed
    assert source.num_observed == len(request.steps)
    assert any(step.num_window for step in request.steps)
    if handler == "stuttering":
        assert sum(step.num_accepted for step in request.steps) > 10
