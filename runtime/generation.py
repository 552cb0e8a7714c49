"""The loop of one generation: start a decoder, step, stop. Text and tokens leave through `Chunk`s."""

from collections.abc import Iterator
from typing import NamedTuple

from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.step import Decoder, Outcome
from mirrorsd.runtime.reporting.results import Chunk, GeneratedToken
from mirrorsd.runtime.text.stopping import StopWatch


class Stop(NamedTuple):
    """The end of the loop: why, and the tokens that count."""

    reason: str
    token_ids: list[int]


def run_steps(decoder: Decoder, watch: StopWatch) -> Iterator[Chunk | Stop]:
    """Step until the text is over; yields a chunk per step and one `Stop` at the end.

    Tokens that a step committed after the stopping token are dropped, and counted nowhere.
    """
    request = decoder.request
    token_ids: list[int] = []
    inflight = decoder.start()
    while True:
        request.raise_if_cancelled()
        outcome = decoder.step(inflight)
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
