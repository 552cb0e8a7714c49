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
    """What one step added to a choice. `pieces` are its text by source, `spans` what the devices did meanwhile.

    `ids` are its tokens, whether their text is shown yet or not. `is_sent` says that an earlier answer has sent all of
    it: the client has it already.
    """

    choice: int
    text: str
    calls: Sequence[Call]
    tokens: Sequence[Placed]
    pieces: Sequence[tuple[str, str]]
    spans: Sequence[tuple[str, str, float, float]]
    is_last: bool
    ids: Sequence[int]
    is_sent: bool


@dataclass
class Choice:
    """One choice, and all that has come of it; `echo` is shown with the first of it.

    An earlier answer has sent what its first `num_sent` tokens say, and where `is_end_sent` its end as well.
    """

    index: int
    shown: ShownTokens
    reader: Reader
    num_sent: int = 0
    is_end_sent: bool = False
    num_taken: int = 0
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
        text, calls = "", list[Call]()
        for piece in [token.text for token in chunk.tokens] or [chunk.text]:  # however many tokens a step has
            read = self.reader.push(piece)
            text, calls = text + read.text, [*calls, *read.calls]
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
        ids = [token.id for token in chunk.tokens]
        self.num_taken += len(ids)
        is_sent = self.is_end_sent if is_last else bool(ids) and self.num_taken <= self.num_sent
        return Delta(self.index, text, calls, tokens, pieces, spans, is_last, ids, is_sent)
