"""Answers from a bundle that is loaded in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.cli.chat.answers import CANCELLED, Ended, Piece
from mirrorsd.cli.input.requests import Messages
from mirrorsd.cli.output.console import as_word
from mirrorsd.graphs.errors import Cancelled
from mirrorsd.texts.config import CancelToken
from mirrorsd.texts.speculation import check_head

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline


class InProcess:
    """A pipeline as `Answers`. Its own session keeps the conversation cached from question to question."""

    def __init__(self, pipe: "MirrorPipeline", bundle: Path) -> None:
        self._pipe, self._bundle, self._cancel = pipe, bundle, CancelToken()

    @property
    def name(self) -> str:
        """The bundle's."""
        return self._bundle.resolve().stem

    @property
    def context(self) -> int:
        """The bundle's."""
        return self._pipe.manifest.target.context

    @property
    def advice(self) -> str:
        """The pipeline's, as it is to be typed."""
        return self._pipe.advice.replace("BUNDLE", as_word(self._bundle))

    def check_method(self, method: str) -> None:
        """Hold a method against the bundle's heads."""
        check_head(method, self._pipe.manifest, self._pipe.methods)

    def num_tokens(self, messages: Messages) -> int:
        """Tokens of a conversation through the chat template."""
        return len(self._pipe.encode(messages=messages))

    def stream(self, messages: Messages, config: "GenerationConfig") -> Iterator[Piece]:
        """Answer, a piece per step."""
        self._cancel = CancelToken()
        config = config.resolve(self._pipe.manifest.chat_settings(config.temperature))
        try:
            for chunk in self._pipe.stream(config=config, messages=messages, cancel=self._cancel):
                num_from_windows = sum(token.source == "window" for token in chunk.tokens)
                ended = None if chunk.result is None else ended_by(chunk.result)
                yield Piece(chunk.text, len(chunk.tokens), num_from_windows, ended)
        except Cancelled as stop:
            unbegun = Ended(text="", method=config.method, seed=config.seed, stop_reason=CANCELLED, num_tokens=0)
            yield Piece("", 0, 0, unbegun if stop.result is None else ended_by(stop.result))

    def cancel(self) -> None:
        """End the answer within a step."""
        self._cancel.cancel()


def ended_by(result: "GenerationResult") -> Ended:
    """A result as a conversation shows it."""
    stats = result.stats
    return Ended(
        text=result.text,
        method=result.method,
        seed=result.seed,
        stop_reason=result.stop_reason,
        num_tokens=result.num_tokens,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_reused_tokens=stats.num_reused_tokens,
        first_token_ms=stats.time_to_first_token_ms,
        tokens_per_second=stats.tokens_per_second,
        tokens_per_step=stats.tokens_per_step,
        num_drafted=sum(step.num_window for step in result.steps),
        num_accepted=sum(step.num_accepted for step in result.steps),
        warnings=stats.warnings,
        write_trace=result.write_trace,
    )
