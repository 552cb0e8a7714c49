"""Windows from a head: a small part beside the target that guesses from the hidden states of its last pass.

What a head has read of a text is kept from request to request, like what the target has cached. A head that fails costs
speed, never a token.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import TargetSession
from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import Found, InFlight, ReadPrompt
from mirrorsd.runtime.decoding.target_link import TargetLink
from mirrorsd.runtime.draft.chain import NO_TOKENS, longest_common_prefix

_FEWEST_FORCED = 2
"""Tokens that a form leaves no choice of, from which on they are a better window than the head's own."""


class HeadLink:
    """One head of one session: what it has read, and its runs, each after the pass whose rows it reads.

    Attributes:
        kind: which head.
        length: tokens that it guesses.
        failure: why it was given up in the current request, or None while it works.
    """

    def __init__(self, kind: str, session: TargetSession, target: TargetLink) -> None:
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

    def read(self, request: Request, start: int, stop: int) -> NDArray[np.int64]:
        """As `guess`, for rows of a prompt: those that are neither remembered nor the last ones are of no use."""
        is_wanted = self._remembers or stop == request.num_tokens - 1
        return self.guess(request, start, stop) if is_wanted else NO_TOKENS

    def guess(self, request: Request, start: int, stop: int) -> NDArray[np.int64]:
        """Read rows `start .. stop - 1` of the text, with which the target's last pass began.

        Returns:
            `[K]`, what may follow the token at `stop`, which the target has not read yet; empty if the head fails.

        Raises:
            Cancelled: the request was cancelled meanwhile.
        """
        self._num_read = min(self._num_read, start)
        text = request.tokens[: stop + 1]
        if self.failure is not None:
            return NO_TOKENS
        try:
            found = self._target.guess(request, self.kind, start, text[start + 1 :], self._noise(request, stop + 1))
        except DeviceError as error:
            request.raise_if_cancelled()
            self._give_up(str(error))
            return NO_TOKENS
        self._text[start : stop + 1] = text[start:]
        self._num_read = stop
        return found.ids[:, 0]

    def _noise(self, request: Request, position: int) -> NDArray[np.float32] | None:
        """What competes with the guesses at `position` and behind it, `[K, V]`; None where nothing does."""
        source = request.chooser.noise_source()
        if source is None:
            return None
        vocab_size = self._target.vocab_size
        return np.stack([source(position + row, vocab_size) for row in range(self.length)]).astype(np.float32)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        message = f"The head failed ({reason}); the rest of this text is decoded plainly. The text is unaffected."
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class HeadSource:
    """Asks a head for every window, between two passes of the target.

    Attributes:
        name: the head's kind.
    """

    def __init__(self, request: Request, head: HeadLink) -> None:
        self.name = head.kind
        self._request, self._head = request, head
        self._first = NO_TOKENS
        request.chooser.be_heard()

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """The target reads the prompt, the head what the target has read; the first window comes with its last rows."""
        read_prompt(self)
        return self._allowed(self._first)

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        """See `RowReader`."""
        return self._head.num_read(tokens)

    def read(self, start: int, stop: int) -> None:
        """See `RowReader`."""
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
            window = self._head.guess(request, inflight.head, stop)
            request.ledger.drafted_s += request.ledger.now() - asked - (request.ledger.queued_s - queued_s)
        forced = request.constraint.forced(request.window_limit()) if request.constraint is not None else NO_TOKENS
        return Found(forced, "forced") if len(forced) >= _FEWEST_FORCED else Found(self._allowed(window), "fresh")

    def _allowed(self, window: NDArray[np.int64]) -> NDArray[np.int64]:
        """As much of a window as is of use, and as a constrained text may say."""
        request = self._request
        window = window[: request.window_limit()]
        return window if request.constraint is None else window[: request.constraint.num_allowed(window)]

    def observe(self, step: StepRecord) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """Nothing is ever left running."""
