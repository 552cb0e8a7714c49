"""Scripted models behind the real protocols, and one way to decode with them."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.decoding.protocol import Decoder
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.seat import Seat
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import TargetOutput
from mirrorsd.runtime.sampling.chooser import Mask
from mirrorsd.testing.fake import FakeDraft, FakeModel, FakeTarget
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

VOCAB = 16
LISTENING = {"root_source": "progressive"}
"""Roots from the exits, too: the fake draft has no runners-up."""


def scripted_logits(text: list[int]) -> np.ndarray:
    """A fixed pseudo-random model: logits depend on the last three tokens and the parity of the position."""
    seed = sum(token * 31**i for i, token in enumerate(text[-3:])) * 2 + len(text) % 2
    return np.random.default_rng(seed).normal(scale=2.0, size=VOCAB)


def greedy_continuation(text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(int(scripted_logits(text).argmax()))
    return text[-count:]


def make_draft_handler(hit_rate: float, streams: int) -> Callable[[list[int]], list[int]]:
    """A draft that continues like the target, each token with this probability (fixed by the text)."""

    def handler(text: list[int]) -> list[int]:
        text, guesses = list(text), []
        for _ in range(1 + streams):
            token = int(scripted_logits(text).argmax())
            if np.random.default_rng([7, *text[-5:], len(text)]).random() >= hit_rate:
                token = (token + 1) % VOCAB
            text.append(token)
            guesses.append(token)
        return guesses

    return handler


class SteadyTarget(FakeTarget):
    """Time passes only here, one second a pass, and a pass lasts until the draft has done all it can beside it.

    So what is decided by the clock is the same on every machine. A draft that shall cost time adds to `seconds`.
    """

    draft_worker: DeviceWorker
    seconds = 0.0

    def run(self, *arguments: Any, **options: Any) -> TargetOutput:
        output = super().run(*arguments, **options)
        while self.draft_worker.has_pending():
            time.sleep(0.0001)
        self.seconds += 1.0
        return output


class Bench:
    """An engine over fakes, and the texts it decodes."""

    def __init__(
        self, target: FakeTarget, draft: FakeDraft, speculation: SpeculationConfig, *, takes_turns: bool = False
    ) -> None:
        self.target, self.draft, self.speculation = target, draft, speculation
        models = (lambda: FakeModel(lambda: target)), (lambda: FakeModel(lambda: draft))
        self.engine = Engine(*models, takes_turns=takes_turns)
        if isinstance(target, SteadyTarget):
            target.draft_worker = self.engine.draft_worker
        self.seat = Seat(self.engine)
        self.cancel = threading.Event()
        self.last_request: Request | None = None
        self.last_decoder: Decoder | None = None

    def decode(self, prompt: list[int], method: str, constraint: Mask | None = None, **settings: Any) -> list[int]:
        config = GenerationConfig(method=method, **{"max_new_tokens": 40, **settings})
        request = Request(prompt, config, self.speculation, self.seat.context, self.cancel, constraint)
        if isinstance(self.target, SteadyTarget):
            request.ledger.now = lambda: self.target.seconds
        decoder = self.seat.decoder(request, method)
        self.last_request, self.last_decoder = request, decoder
        inflight = decoder.start()
        try:
            while request.num_tokens < request.max_tokens:
                request.raise_if_cancelled()
                inflight = decoder.step(inflight).inflight
        finally:
            decoder.close()
        return request.tokens[request.num_prompt :].tolist()


@pytest.fixture
def scripted() -> Callable[[list[int]], np.ndarray]:
    return scripted_logits


@pytest.fixture
def draft_handler() -> Callable[[float, int], Callable[[list[int]], list[int]]]:
    return make_draft_handler


@pytest.fixture
def confident_exit() -> Callable[[list[int]], np.ndarray]:
    """An exit that is sure of the target's own choice."""
    return lambda text: 20.0 * scripted_logits(text)


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(
        *,
        hit_rate: float = 0.7,
        streams: int = 3,
        context: int = 256,
        draft: FakeDraft | None = None,
        exit_handler: Callable[[list[int]], np.ndarray] | None = None,
        target_handler: Callable[[list[int]], np.ndarray] = scripted_logits,
        vocab: int = VOCAB,
        suffix_seconds: float = 0.0,
        is_steady: bool = False,
        takes_turns: bool = False,
        **speculation: Any,
    ) -> Bench:
        target = (SteadyTarget if is_steady else FakeTarget)(
            target_handler, vocab_size=vocab, context=context, exit_handler=exit_handler, suffix_seconds=suffix_seconds
        )
        draft = draft or FakeDraft(
            make_draft_handler(hit_rate, streams), vocab_size=vocab, num_streams=streams, capacity=context
        )
        bench = Bench(target, draft, SpeculationConfig(**LISTENING | speculation), takes_turns=takes_turns)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        bench.engine.close()
