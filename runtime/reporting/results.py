"""What a generation gives: tokens, chunks, the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from mirrorsd.devices.layouts import Layout
from mirrorsd.runtime.decoding.protocol import GeneratedToken
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.decoding.seat import SeatedDecoder
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.stats import GenerationStats, summarise
from mirrorsd.runtime.reporting.trace import write_trace
from mirrorsd.runtime.sampling.chooser import TokenLogprob
from mirrorsd.texts.result_page import Piece, result_page

_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult:
    """A finished text; `str` of it is the text.

    Attributes:
        text: the new text alone, cut before a stop string; special tokens are in it only where they are asked for.
        prompt_ids: the prompt's tokens, special ones included.
        token_ids: the new tokens, the end-of-sequence token included.
        stop_reason: `eos`, `stop_token`, `stop_string`, `length` (max_new_tokens), `context` (no room left),
            `deadline` (deadline_s is over) or `cancelled` (see `Cancelled.result`).
        method: what ran: `mirror`, `serial`, `plain`, or `auto` (`stats.steps_by_method` says what it chose).
        device_map: name of the device map.
        layout: how target and draft shared the processor (see `layouts`).
        seed: what the text was sampled with, drawn where none was given; None where it is greedy.
        stats: figures; see `GenerationStats`.
        spans: what each device did when.
        steps: the verification steps.
        logprobs: what the target thought of each new token; empty where nobody asked.
        tokens: the new tokens, with where each came from.
        step_texts: what text became certain with each of them.
    """

    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    stop_reason: str
    method: str
    device_map: str
    layout: str
    seed: int | None
    stats: GenerationStats
    spans: tuple[Span, ...]
    steps: tuple[StepRecord, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[GeneratedToken, ...] = ()
    step_texts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _MOST_SHOWN else f"{self.text[:_MOST_SHOWN]}..."
        return f"<{type(self).__name__}: {self._what()}: {shown!r}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the text with drafted tokens marked, and when the devices worked."""
        pieces = [Piece(token.source, token.text) for token in self.tokens]
        return result_page(self._what(), self.text, pieces, self.spans)

    def _what(self) -> str:
        return f"{self.num_tokens} tokens by {self.method}, ended by {self.stop_reason}"

    def write_trace(self, path: str | Path) -> None:
        """Write what each device did when as a Chrome trace (JSON)."""
        title = f"mirrorsd {self.method} on {self.device_map}"
        about = {"plain_tokens_per_second": self.stats.plain_tokens_per_second}
        write_trace(Path(path), self.spans, self.steps, title=title, texts=self.step_texts, about=about)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)


class Chunk(NamedTuple):
    """What one step added: text that is certain, and its tokens. `result` comes with the last chunk.

    `spans` is what the devices have done since the chunk before; what ends later comes with the next one.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    result: GenerationResult | None = None
    spans: tuple[Span, ...] = ()


def result_of(
    place: SeatedDecoder,
    chunks: Sequence[Chunk],
    stop_reason: str,
    started: float,
    layout: Layout,
    plain_tokens_per_second: float | None,
) -> GenerationResult:
    """What became of a text that `started` then and ends now."""
    request = place.request
    tokens = [token for chunk in chunks for token in chunk.tokens]
    failure = place.draft_failure
    return GenerationResult(
        text="".join(chunk.text for chunk in chunks),
        prompt_ids=request.tokens[: request.num_prompt].tolist(),
        token_ids=[token.id for token in tokens],
        stop_reason=stop_reason,
        method=place.name,
        device_map=layout.device_map.name,
        layout=layout.name,
        seed=request.config.seed,
        stats=summarise(
            request,
            started,
            perf_counter(),
            [f"The draft failed: {failure}."] if failure else [],
            stop_reason=stop_reason,
            plain_tokens_per_second=plain_tokens_per_second,
        ),
        spans=tuple(request.ledger.spans),
        steps=tuple(request.steps),
        logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
        tokens=tuple(tokens),
        step_texts=tuple(chunk.text for chunk in chunks[: len(request.steps)]),
    )
