"""What the loop, a step and a source of windows say to each other: records and protocols.

Owns: their shapes. Does not own: the step (`step`), where windows come from (`lookup`, `mirror`, `head`, `auto`).
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.request import Acceptance, Request, StepRecord
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.ledger import ExitGuesses, Span
from mirrorsd.runtime.policy.siblings import NO_SIBLINGS, Siblings
from mirrorsd.runtime.sampling.chooser import TokenLogprob


class InFlight(NamedTuple):
    """The next thing to verify: the head token stands at position `head`, `window` follows it, `siblings` stand beside.

    The `num_again` tokens before the head were siblings, whose rows are not kept: they are fed once more.
    """

    head: int
    window: NDArray[np.int64]
    siblings: Siblings = NO_SIBLINGS
    num_again: int = 0

    def rows_of(self, acceptance: Acceptance) -> NDArray[np.int64]:
        """Rows of the pass that are text, the head token's first.

        >>> found = Acceptance(1, 4, (), aside=(5,), rows_aside=(3,))
        >>> InFlight(9, np.array([7, 8]), num_again=1).rows_of(found).tolist()
        [1, 2, 4]
        """
        return self.num_again + np.array([*range(1 + acceptance.num_accepted), *acceptance.rows_aside])


class Outcome(NamedTuple):
    """One step's committed tokens (accepted window tokens, then the target's own) and what to verify next."""

    tokens: list[int]
    num_accepted: int
    inflight: InFlight
    method: str


class Found(NamedTuple):
    """The next window; `source` as in `StepRecord.next_source`.

    `then` finds the windows from the next step on, and is closed at last; None: whoever has found this one.
    """

    window: NDArray[np.int64] = NO_TOKENS
    source: str = "none"
    siblings: Siblings = NO_SIBLINGS
    then: "WindowSource | None" = None


class Beside(Protocol):
    """What works beside one pass of the target; `is_listening` says whether it wants to hear the exits."""

    is_listening: bool

    def start(self) -> None:
        """The pass begins. Runs on the target's thread, just before its device starts."""

    def hear(self, guesses: ExitGuesses) -> None:
        """An exit has spoken. Runs on the target's thread, between its stages."""

    def end(self, acceptance: Acceptance) -> None:
        """The pass is over and verified. Runs on the scheduler's thread, as all of `WindowSource` does."""


class RowReader(Protocol):
    """Reads what the target's passes leave behind of the prompt's rows."""

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        """How many rows of a text it has read before; those behind them must pass through the target again."""

    def read(self, start: int, stop: int) -> None:
        """Rows `start .. stop - 1` have passed, and no other pass has begun since."""


class ReadPrompt(Protocol):
    """Has the target read the prompt, and `reader` what has been read."""

    def __call__(self, reader: RowReader | None = None) -> None:
        """Read it."""


class WindowSource(Protocol):
    """Where the next window comes from.

    Attributes:
        name: the method of the step that has begun last.
    """

    name: str

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """Have the target read the prompt, and get ready meanwhile; the first window."""

    def begin(self, inflight: InFlight) -> Beside | None:
        """A pass over `inflight` is about to begin: what works beside it; by itself nothing."""
        return None

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The window after `inflight`, which was verified and committed."""

    def observe(self, step: StepRecord) -> None:
        """Learn from the step, which is over; by itself nothing is learned."""
        return

    def close(self) -> None:
        """Leave nothing running; by itself nothing is."""
        return


class Decoder(Protocol):
    """What the generation loop needs."""

    name: str
    request: Request

    def start(self) -> InFlight:
        """Prefill; the first window to verify."""

    def step(self, inflight: InFlight) -> Outcome:
        """Verify, commit, find the next window."""

    def close(self) -> None:
        """Leave nothing running that belongs to this request."""


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


class Written(NamedTuple):
    """What one step added: text that is certain, its tokens, and what the devices have done since the step before."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    spans: tuple[Span, ...] = ()


class Stop(NamedTuple):
    """The end of the loop: why, and the tokens that count."""

    reason: str
    token_ids: list[int]
