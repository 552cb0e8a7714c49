"""What a conversation needs from whoever answers, be it a bundle in this process or a server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mirrorsd.cli.input.requests import Messages
    from mirrorsd.runtime import GenerationConfig

CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an answer ended, with its figures.

    Attributes:
        text: the whole answer.
        method: what decoded it.
        seed: what it was sampled with; None where it is greedy, or not known.
        stop_reason: as in `GenerationResult`.
        num_tokens: new tokens.
        num_prompt_tokens: tokens that were read.
        num_reused_tokens: of these, how many were cached.
        first_token_ms: from the question to the first token.
        tokens_per_second: new tokens over the time of decoding.
        tokens_per_step: new tokens per pass of the target.
        num_drafted: window tokens that were verified.
        num_accepted: of these, how many were right.
        warnings: what went wrong without changing the text.
        write_trace: writes a file of what each device did when; None where the steps are not known.
    """

    text: str
    method: str
    seed: int | None
    stop_reason: str
    num_tokens: int
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    first_token_ms: float = 0.0
    tokens_per_second: float = 0.0
    tokens_per_step: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    warnings: Sequence[str] = ()
    write_trace: Callable[[Path], None] | None = None


class Piece(NamedTuple):
    """Text that is certain, how many tokens it took, and how many of them came from windows; at last, how it ended."""

    text: str
    num_tokens: int
    num_from_windows: int
    ended: Ended | None = None


class Answers(Protocol):
    """Answers conversations. `cancel` may be called from another thread; everything else from one at a time."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def advice(self) -> str:
        """What would make answers faster; empty where nothing is known that would."""

    def check_method(self, method: str) -> None:
        """Refuse a method that cannot run here.

        Raises:
            ConfigError: it needs a head that is not here.
        """

    def num_tokens(self, messages: "Messages") -> int:
        """How many tokens the model would read.

        Raises:
            GenerationError: no chat template, or it refuses the messages.
        """

    def stream(self, messages: "Messages", config: "GenerationConfig") -> Iterator[Piece]:
        """Answer; the last piece says how it ended, also after `cancel`.

        Raises:
            MirrorError: it cannot be answered.
        """

    def cancel(self) -> None:
        """End the answer that is being given within a step."""
