"""The loop of one generation: start a driver, step, stop. Text and tokens leave through `Chunk`s."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mirrorsd.runtime.drivers import PlainDriver
from mirrorsd.runtime.generation_stats import GenerationStats
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.stopping import StopWatch


class GeneratedToken(NamedTuple):
    """A token and where it came from: `window` (drafted and verified), `correction` (the target's own), `plain`."""

    id: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished text.

    Attributes:
        text: the new text, without special tokens, cut before a stop string.
        token_ids: the new tokens, the end-of-sequence token included.
        stop_reason: `eos`, `stop_token`, `stop_string`, `length` (max_new_tokens) or `context` (no room left).
        method: what ran: `mirror`, `serial` or `plain`.
        device_map: name of the device map.
    """

    text: str
    token_ids: list[int]
    stop_reason: str
    method: str
    device_map: str
    stats: GenerationStats

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


def run_steps(driver: PlainDriver, watch: StopWatch) -> Iterator[Chunk | Stop]:
    """Step until the text is over; yields a chunk per step and one `Stop` at the end.

    Tokens that a step committed after the stopping token are dropped.
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
            reason = _limit_reason(request)
            texts.append(watch.finish())
        tokens = _label(driver, token_ids[first:], outcome.num_accepted)
        yield Chunk("".join(texts), tokens)
        if reason is not None:
            yield Stop(reason, token_ids)
            return


def _limit_reason(request: Request) -> str:
    return "length" if request.num_new >= request.config.max_new_tokens else "context"


def _label(driver: PlainDriver, token_ids: list[int], num_accepted: int) -> tuple[GeneratedToken, ...]:
    own = "plain" if driver.name == "plain" else "correction"
    return tuple(GeneratedToken(token, "window" if i < num_accepted else own) for i, token in enumerate(token_ids))
