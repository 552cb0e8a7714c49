"""Windows from a head: a small part beside the target that guesses from the hidden states of its last pass.

What a head has read of a text is kept from request to request, like what the target has cached. A head that fails costs
speed, never a token.
"""

import warnings
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Head
from mirrorsd.runtime.backends.protocol import HeadGuesses
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import FEWEST_FORCED, Acceptance, Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.target_link import RowReader, TargetLine
from mirrorsd.runtime.draft.tree import NO_TOKENS, longest_common_prefix
from mirrorsd.runtime.policy.windows import Share
from mirrorsd.runtime.sampling.chooser import TokenChooser

_LEAST_SHARE = -20.0
"""In logs: what a guess without runners-up leaves to others."""


class Headed(Protocol):
    """A target with heads beside it; see `TargetSession`."""

    context: int
    heads: Mapping[str, Head]


class HeadLink:
    """One head of one session: what it has read, and its runs, each after the pass whose rows it reads.

    Attributes:
        kind: which head.
        length: tokens that it guesses.
        failure: why it was given up in the current request, or None while it works.
    """

    def __init__(self, kind: str, session: Headed, target: TargetLine) -> None:
        shape = session.heads[kind].shape
        self.kind, self.length = kind, shape.length
        self.failure: str | None = None
        self._target, self._remembers = target, shape.num_layers > 0
        self._text = np.zeros(session.context + 1, dtype=np.int64)
        self._num_read = 0

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        """How many rows of a text need not pass through the target again for the head's sake.

        A row is read together with the token that follows it. The last row before the text's last token is always
        wanted: from it come the guesses. With rows 0..2 of `[5, 6, 7, 8]` read, the text `[5, 6, 7, 9, 9]` has two rows
        that need not be read again, since row 2 was followed by another token.
        """
        most = max(len(tokens) - 2, 0)
        if not self._remembers:
            return most
        return min(max(longest_common_prefix(self._text[: self._num_read + 1], tokens) - 1, 0), most)

    def read(self, request: Request, start: int, stop: int) -> HeadGuesses | None:
        """As `guess`, for rows of a prompt: those that are neither remembered nor the last ones are of no use."""
        is_wanted = self._remembers or stop == request.num_tokens - 1
        return self.guess(request, start, stop) if is_wanted else None

    def guess(self, request: Request, start: int, stop: int) -> HeadGuesses | None:
        """Read rows `start .. stop - 1` of the text, with which the target's last pass began.

        Returns:
            What may follow the token at `stop`, which the target has not read yet; None if the head fails.

        Raises:
            Cancelled: the request was cancelled meanwhile.
        """
        self._num_read = min(self._num_read, start)
        text = request.tokens[: stop + 1]
        if self.failure is not None:
            return None
        try:
            noise = noise_behind(request.chooser, stop + 1, (self.length, self._target.vocab_size))
            found = self._target.guess(request, self.kind, start, text[start + 1 :], noise)
        except DeviceError as error:
            request.raise_if_cancelled()
            self._give_up(str(error))
            return None
        self._text[start : stop + 1] = text[start:]
        self._num_read = stop
        return found

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        message = f"The head failed ({reason}); the rest of this text is decoded plainly. The text is unaffected."
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def noise_behind(chooser: TokenChooser, position: int, size: tuple[int, int]) -> NDArray[np.float32] | None:
    """What competes with the guesses at `position` and behind it, `[K, V]` as `size` says; None where nothing does."""
    source, (length, vocab_size) = chooser.noise_source(), size
    if source is None:
        return None
    return np.stack([source(position + row, vocab_size) for row in range(length)]).astype(np.float32)


def shares_of(scores: NDArray[np.floating]) -> list[Share]:
    """Of each guess, the logs of its share among the candidates, the first of `scores [n, m]`, and of the best other.

    >>> [tuple(round(log, 2) for log in share) for share in shares_of(np.log(np.array([[0.6, 0.2, 0.0001]])))]
    [(-0.29, -1.39)]
    """
    own = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    others = own[:, 1:].max(axis=1, initial=_LEAST_SHARE)
    return list(zip(own[:, 0].tolist(), others.tolist(), strict=True))


class HeadSource(WindowSource, RowReader):
    """Asks a head for every window, between two passes of the target.

    Attributes:
        name: the head's kind.
    """

    def __init__(self, request: Request, head: HeadLink) -> None:
        self.name = head.kind
        self._request, self._head = request, head
        self._first: HeadGuesses | None = None
        request.chooser.be_heard()

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """The target reads the prompt, the head what the target has read; the first window comes with its last rows."""
        read_prompt(self)
        return self._window(self._first)

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        return self._head.num_read(tokens)

    def read(self, start: int, stop: int) -> None:
        self._first = self._head.read(self._request, start, stop)

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What the head guesses from the accepted rows; it reads them also where a form says how the text goes on."""
        request = self._request
        if not request.window_limit():
            return Found()
        stop = inflight.head + acceptance.num_accepted + 1
        with request.ledger.time("host", "exposed"):
            asked, queued_s = request.ledger.now(), request.ledger.queued_s
            found = self._head.guess(request, inflight.head, stop)
            request.ledger.drafted_s += request.ledger.now() - asked - (request.ledger.queued_s - queued_s)
        forced = request.constraint.forced(request.window_limit()) if request.constraint is not None else NO_TOKENS
        return Found(forced, "forced") if len(forced) >= FEWEST_FORCED else Found(self._window(found), "fresh")

    def _window(self, found: HeadGuesses | None) -> NDArray[np.int64]:
        """As much of the chain as is of use, as a constrained text may say, and as is worth its rows' time."""
        request, lengths = self._request, self._request.windows
        window = NO_TOKENS if found is None else found.ids[: request.window_limit(), 0]
        if request.constraint is not None:
            window = window[: request.constraint.num_allowed(window)]
        if lengths is None or found is None or not len(window):
            return window
        count = len(window)
        positions = np.arange(request.num_tokens, request.num_tokens + count)
        scores = request.chooser.rank(found.ids[:count], found.logprobs[:count], positions)
        return window[: lengths.cut(shares_of(scores), count, count)]

    def observe(self, step: StepRecord) -> None:
        """The lengths of windows learn from it."""
        if self._request.windows is not None:
            self._request.windows.observe(step.num_window, step.num_accepted, step.own_seconds)

    def close(self) -> None:
        """Nothing is ever left running."""
