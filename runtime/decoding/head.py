"""Windows from a head: a small part beside the target that guesses from the hidden states of its last pass.

What a head has read of a text is kept from request to request, like what the target has cached. A head that fails costs
speed, never a token.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import HeadGuesses
from mirrorsd.runtime.decoding.links import TargetLink
from mirrorsd.runtime.decoding.protocol import Found, InFlight, ReadPrompt, RowReader, WindowSource
from mirrorsd.runtime.decoding.request import Acceptance, Request, StepRecord
from mirrorsd.runtime.decoding.step import FEWEST_FORCED, learn, remember, with_siblings
from mirrorsd.runtime.draft.tree import LEAST_SHARE, NO_TOKENS, longest_common_prefix
from mirrorsd.runtime.policy.account import SourceKnowledge
from mirrorsd.runtime.policy.siblings import Known, SiblingChooser
from mirrorsd.runtime.policy.windows import LearnedLengths, Share, WindowLength
from mirrorsd.runtime.sampling.chooser import TokenChooser


class HeadLink:
    """One head of one session: what it has read, and its runs, each after the pass whose rows it reads.

    Attributes:
        kind: which head.
        length: tokens that it guesses.
        failure: why it was given up in the current request, or None while it works.
        has_run: whether it was opened, which the first run does.
        read_share: what a run reads of weights, over what a pass does: so much of a pass it should take.
    """

    def __init__(self, kind: str, target: TargetLink) -> None:
        shape, self.read_share = target.heads[kind].shape, target.heads[kind].read_share
        self.kind, self.length = kind, shape.length
        self.failure: str | None = None
        self.has_run = False
        self._target, self._remembers = target, shape.num_layers > 0
        self._text = np.zeros(target.context + 1, dtype=np.int64)
        self._num_read = 0

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        """How many rows of a text need not pass through the target again for the head's sake.

        A row is read together with the token that follows it. The last row before the text's last token is always
        wanted: from it come the guesses. With rows 0..2 of `[5, 6, 7, 8]` read, the text `[5, 6, 7, 9, 9]` has two rows
        that need not be read again, since row 2 was followed by another token.
        """
        known = longest_common_prefix(self._text[: self._num_read + 1], tokens) - 1 if self._remembers else len(tokens)
        return max(min(known, len(tokens) - 2), 0)

    def read(self, request: Request, start: int, stop: int) -> HeadGuesses | None:
        """As `guess`, for rows of a prompt: those that are neither remembered nor the last ones are of no use."""
        is_wanted = self._remembers or stop == request.num_tokens - 1
        return self.guess(request, start, stop) if is_wanted else None

    def guess(
        self, request: Request, start: int, stop: int, rows: NDArray[np.int64] | None = None
    ) -> HeadGuesses | None:
        """Read rows `start .. stop - 1` of the text, which are `rows` of the target's last pass: by itself the first.

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
            found = self._target.guess(request, self.kind, start, text[start + 1 :], noise, rows)
        except DeviceError as error:
            request.raise_if_cancelled()
            self._give_up(str(error))
            return None
        self._text[start : stop + 1] = text[start:]
        self._num_read, self.has_run = stop, True
        return found

    def lacks_nothing(self, request: Request) -> bool:
        """Whether it has read all that the target has cached of a prompt, but for the row that it guesses from."""
        again = self._target.num_cached(request, self.num_read(request.tokens))
        return again + 1 >= self._target.num_cached(request)

    def follows(self, head: int) -> bool:
        """Whether it can guess behind a pass that began at `head`, for it has read all before, or needs not to."""
        return self.failure is None and self.has_run and (not self._remembers or self._num_read >= head)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        message = f"The head failed ({reason}); the rest of this text is decoded plainly. The text is unaffected."
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def noise_behind(chooser: TokenChooser, position: int, size: tuple[int, int]) -> NDArray[np.float32] | None:
    """What competes with the guesses at `position` and behind it, `[K, V]` as `size` says; None where nothing does."""
    source, (length, vocab_size) = chooser.noise_source(), size
    rows = [] if source is None else [source(position + row, vocab_size) for row in range(length)]
    return np.stack(rows).astype(np.float32) if rows else None


def shares_of(scores: NDArray[np.floating]) -> list[Share]:
    """Of each guess, the logs of its share among the candidates, the first of `scores [n, m]`, and of the best other.

    >>> [tuple(round(log, 2) for log in share) for share in shares_of(np.log(np.array([[0.6, 0.2, 0.0001]])))]
    [(-0.29, -1.39)]
    """
    own = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    others = own[:, 1:].max(axis=1, initial=LEAST_SHARE)
    return list(zip(own[:, 0].tolist(), others.tolist(), strict=True))


class Verified(NamedTuple):
    """What was in flight, and what became of it."""

    inflight: InFlight
    acceptance: Acceptance


class HeadSource(WindowSource, RowReader):
    """Asks a head for every window, between two passes of the target.

    Attributes:
        name: the head's kind.
        link: the head.
        windows: what cuts its windows; None leaves them as long as they come.
        first: what it guesses behind the prompt, if it has read that.
    """

    def __init__(
        self, request: Request, head: HeadLink, windows: WindowLength | None, siblings: SiblingChooser | None = None
    ) -> None:
        """Where there are `siblings`, some of the head's other candidates stand beside each window."""
        self.name, self.windows, self._siblings = head.kind, windows, siblings
        self._request, self.link = request, head
        self.first: HeadGuesses | None = None

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """The target reads the prompt, the head what the target has read; the first window comes with its last rows."""
        read_prompt(self)
        return self.first_window()

    def first_window(self) -> NDArray[np.int64]:
        """What it guesses behind the prompt, which it has read."""
        return self._window(self.first)[0]

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        return self.link.num_read(tokens)

    def read(self, start: int, stop: int) -> None:
        self.first = self.link.read(self._request, start, stop)

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What the head guesses from the accepted rows; it reads them also where a form says how the text goes on."""
        request = self._request
        if not request.window_limit():
            return Found()
        stop = inflight.head + acceptance.num_right + 1
        with request.ledger.time("host", "exposed"):
            asked, queued_s = request.ledger.now(), request.ledger.queued_s
            found = self.link.guess(request, inflight.head, stop, inflight.rows_of(acceptance))
            request.ledger.drafted_s += request.ledger.now() - asked - (request.ledger.queued_s - queued_s)
        constraint = request.chooser.mask
        forced = constraint.forced(request.window_limit()) if constraint is not None else NO_TOKENS
        if len(forced) >= FEWEST_FORCED:
            return Found(forced, "forced")
        window, known = self._window(found)
        return with_siblings(Found(window, "fresh"), known, self._siblings, request)

    def _window(self, found: HeadGuesses | None) -> tuple[NDArray[np.int64], Known | None]:
        """As much of the chain as is of use, as a constrained text may say, and as is worth its rows' time.

        Beside it, what it was cut from.
        """
        request, lengths, constraint = self._request, self.windows, self._request.chooser.mask
        window = NO_TOKENS if found is None else found.ids[: request.window_limit(), 0]
        if constraint is not None:
            window = window[: constraint.num_allowed(window)]
        if lengths is None or found is None or not len(window):
            return window, None
        count = len(window)
        positions = np.arange(request.num_tokens, request.num_tokens + count)
        ids, logprobs = found.ids[:count], found.logprobs[:count]
        known = Known(shares_of(request.chooser.rank(ids, logprobs, positions)), count, [*ids], [*logprobs])
        return window[: lengths.cut(known.shares, count, count)], known

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the pass."""
        remember(self.windows, self._siblings)

    def observe(self, step: StepRecord) -> None:
        """The lengths of windows learn from it."""
        learn(step, self.windows, self._siblings)


class HeadArm(RowReader):
    """A head among the sources that `auto` weighs: what it is worth is what its windows have really brought.

    It is read along with the prompt, or not at all in a text: a head that remembers rows cannot join later without
    having them computed again.

    Attributes:
        source: the head.
        known: what texts have taught about it.
        lost: tokens that its windows have cost this text more than they brought.
    """

    def __init__(self, source: HeadSource, known: tuple[SourceKnowledge, LearnedLengths]) -> None:
        self.source, (self.known, self._lengths) = source, known
        self._link, windows = source.link, source.windows
        if not self.known.draft_seconds and windows is not None:
            self.known.draft_seconds = self._link.read_share * windows.pass_seconds(1)
        self.lost = self._promised = 0.0
        self._is_read = self._is_trial = False

    @property
    def is_working(self) -> bool:
        """Whether it has not failed."""
        return self._link.failure is None

    def may_read(self, request: Request) -> bool:
        """Whether the prompt can be read with it, and nothing that is cached has to be computed again."""
        return self._link.lacks_nothing(request)

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        return self._link.num_read(tokens)

    def read(self, start: int, stop: int) -> None:
        self.source.read(start, stop)
        self._is_read = self.source.first is not None

    def follows(self, head: int | None) -> bool:
        """Whether it can guess behind a pass that began at `head`; behind the prompt where that is None."""
        return self._is_read and (head is None or self._link.follows(head))

    def window(self, done: Verified | None, speed: float, *, is_trial: bool) -> Found:
        """Its window behind what was verified, or behind the prompt; whoever takes another had it read along."""
        self._lengths.tokens_per_second = speed
        found = Found(self.source.first_window(), "fresh") if done is None else self.source.next(*done)
        self._promised = self.source.windows.worth if self.source.windows is not None else float(len(found.window))
        self._is_trial = is_trial
        return found

    def verified(self, inflight: InFlight, acceptance: Acceptance, speed: float, drafted_seconds: float) -> None:
        """Its window was verified."""
        windows, num_right = self.source.windows, acceptance.num_right
        rows = 0.0
        if windows is not None:
            num_rows = 1 + len(inflight.window) + len(inflight.siblings.tokens)
            rows = speed * windows.slowdown * (windows.pass_seconds(num_rows) - windows.pass_seconds(1))
        if drafted_seconds:
            self.known.observe_drafting(drafted_seconds, 0)
        self.known.observe_head(num_right, rows, self._promised, is_trial=self._is_trial)
        self.lost = max(self.lost + rows + drafted_seconds * speed - num_right, 0.0)


class Together(RowReader):
    """Several heads that read a prompt along."""

    def __init__(self, readers: Sequence[HeadArm]) -> None:
        self._readers = readers

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        return min(reader.num_read(tokens) for reader in self._readers)

    def read(self, start: int, stop: int) -> None:
        for reader in self._readers:
            reader.read(start, stop)
