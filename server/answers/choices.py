"""The choices of an answer as they come: text, calls, tokens; the same for all ways of asking."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mirrorsd.runtime import GenerationResult
from mirrorsd.server.answers.figures import finish_reason
from mirrorsd.server.answers.shown import Placed, ShownTokens
from mirrorsd.server.answers.tools import Call, Reader
from mirrorsd.server.bundles.loaded import Part


class Delta(NamedTuple):
    """What one step added to a choice. `pieces` are its text by source, `spans` what the devices did meanwhile."""

    choice: int
    text: str
    calls: Sequence[Call]
    tokens: Sequence[Placed]
    pieces: Sequence[tuple[str, str]]
    spans: Sequence[tuple[str, str, float, float]]
    is_last: bool


@dataclass
class Choice:
    """One choice, and all that has come of it; `echo` is shown with the first of it."""

    index: int
    shown: ShownTokens
    reader: Reader
    echo: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Placed] = field(default_factory=list)
    pieces: list[tuple[str, str]] = field(default_factory=list)
    result: GenerationResult | None = None

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended."""
        assert self.result is not None
        reason = finish_reason(self.result)
        return "tool_calls" if self.calls and reason == "stop" else reason

    def take(self, part: Part) -> Delta:
        """Add what came."""
        chunk = part.chunk
        is_last = chunk.result is not None
        tokens, pieces = self.shown.take(chunk.tokens, chunk.text, is_last=is_last)
        read = self.reader.push(chunk.text)
        text, calls = read.text, list(read.calls)
        if is_last:
            rest = self.reader.finish()
            text, calls = text + rest.text, [*calls, *rest.calls]
            self.result = chunk.result
        text, self.echo = self.echo + text, ""
        self.text += text
        self.calls += calls
        self.tokens += tokens
        self.pieces += pieces
        spans = [(span.device, span.name, span.start, span.end) for span in getattr(chunk, "spans", ())]
        return Delta(self.index, text, calls, tokens, pieces, spans, is_last)
