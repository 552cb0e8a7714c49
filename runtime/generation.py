"""The loop of one generation: start a driver, step, stop. Text and tokens leave through `Chunk`s."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mirrorsd.runtime.decoding.plain import Driver, Outcome
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.generation_stats import GenerationStats
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.text.stopping import StopWatch
from mirrorsd.runtime.trace import write_trace


class GeneratedToken(NamedTuple):
    """A token and where it came from: `window` (drafted and verified), `correction` (the target's own), `plain`."""

    id: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished text.

    Attributes:
        text: the new text, without special tokens, cut before a stop string.
        prompt_ids: the prompt's tokens, special ones included.
        token_ids: the new tokens, the end-of-sequence token included.
        stop_reason: `eos`, `stop_token`, `stop_string`, `length` (max_new_tokens) or `context` (no room left).
        method: what ran: `mirror`, `serial`, `plain`, or `auto` (`stats.steps_by_method` says what it chose).
        device_map: name of the device map.
        layout: how target and draft shared the processor (see `layouts`).
        seed: what the text was sampled with, drawn where none was given; None where it is greedy.
        stats: figures; see `GenerationStats`.
        spans: what each device did when.
        steps: the verification steps.
    """

    text: str
    prompt_ids: list[int] = field(repr=False)
    token_ids: list[int]
    stop_reason: str
    method: str
    device_map: str
    layout: str
    seed: int | None
    stats: GenerationStats
    spans: tuple[Span, ...] = field(repr=False)
    steps: tuple[StepRecord, ...] = field(repr=False)

    def write_trace(self, path: str | Path) -> None:
        """Write what each device did when as a Chrome trace (JSON)."""
        title = f"mirrorsd {self.method} on {self.device_map}"
        write_trace(Path(path), self.spans, self.steps, title=title)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)


class Chunk(NamedTuple):
    """What one step added: text that is certain, and its tokens. `result` comes with the last chunk."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    result: GenerationResult | None = None


class Stop(NamedTuple):
    """The end of the loop: why, and the tokens that count."""

    reason: str
    token_ids: list[int]


def run_steps(driver: Driver, watch: StopWatch) -> Iterator[Chunk | Stop]:
    """Step until the text is over; yields a chunk per step and one `Stop` at the end.

    Tokens that a step committed after the stopping token are dropped, and counted nowhere.
    """
    request = driver.request
    token_ids: list[int] = []
    inflight = driver.start()
    while True:
        request.raise_if_cancelled()
        outcome = driver.step(inflight)
        inflight = outcome.inflight
        texts: list[str] = []
        reason: str | None = None
        first = len(token_ids)
        for token in outcome.tokens:
            token_ids.append(token)
            piece = watch.push(token)
            texts.append(piece.text)
            reason = piece.stop_reason
            if reason is not None:
                break
        if reason is None and request.num_tokens >= request.max_tokens:
            last = watch.finish(_limit_reason(request))
            texts.append(last.text)
            reason = last.stop_reason
        tokens = _label(outcome, token_ids[first:])
        if reason is not None:
            request.end_after(len(token_ids))
        yield Chunk("".join(texts), tokens)
        if reason is not None:
            yield Stop(reason, token_ids)
            return


def _limit_reason(request: Request) -> str:
    return "length" if request.num_new >= request.config.max_new_tokens else "context"


def _label(outcome: Outcome, token_ids: list[int]) -> tuple[GeneratedToken, ...]:
    own = "plain" if outcome.method == "plain" else "correction"
    sources = ["window"] * outcome.num_accepted + [own]
    return tuple(GeneratedToken(token, source) for token, source in zip(token_ids, sources, strict=False))
