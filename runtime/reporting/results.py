"""What a generation gives: tokens, chunks, the result."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.stats import GenerationStats
from mirrorsd.runtime.reporting.trace import write_trace
from mirrorsd.runtime.sampling.chooser import TokenLogprob
from mirrorsd.texts.result_page import Piece, result_page


class GeneratedToken(NamedTuple):
    """A token and where it came from.

    `window`: drafted and verified; `lookup`: taken from earlier text and verified; `correction`: the target's own
    behind what it verified; `plain`: decoded plainly.
    `logprob` is what the target thought of it, where `GenerationConfig.logprobs` asks for that.
    `text` is what became certain with it: those of all tokens, joined, are the result's text.
    `num_decoded` counts the characters that it decoded to itself, shown with it, with a later token, or never.
    """

    id: int
    source: str
    text: str = ""
    logprob: TokenLogprob | None = None
    num_decoded: int = 0


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
