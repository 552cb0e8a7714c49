"""What a device is asked for a request and what it answers, when it worked, and what such work takes lately.

Passes, tickets for what they say, the ledger of times, and running means: of seconds, and of how often guesses are
right. Nothing here decides. The loop writes the ledger, `reporting/stats` reads it. It is also the clock of whoever
writes to it, so that the same scheduler runs in real and in simulated time.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf, log
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.short_rows import ShortRow
from mirrorsd.texts.config import LONGEST_WINDOW

Result = TypeVar("Result")
PASS_PARTS = ("prefix", "middle", "exit", "suffix")
"""How the names of a target pass's spans begin; with several exits there are `middle1`, `exit2` and so on."""

TIME_MEMORY = 0.8
"""Of seconds, per measurement. 0.6: 0.98 to 1.01. 0.9: 0.95 to 1.01."""
_FIRST_RATE, RATE_MEMORY = 0.6, 0.95
"""Of the acceptance rate: where it begins, and what it keeps per token. Speeds as in `windows`: beginning at 0.3, 0.98
to 1.02, at 0.9, 0.95 to 1.02; keeping 0.8, 0.96 to 1.03."""


class Span(NamedTuple):
    """One piece of work: `device` is `target`, `draft` or `host`; `start` and `end` in seconds of the clock."""

    device: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start

    @property
    def is_of_pass(self) -> bool:
        """Whether the target's device computed a part of a pass in it.

        >>> Span("target", "middle1", 0, 1).is_of_pass, Span("target", "read", 0, 1).is_of_pass
        (True, False)
        """
        return self.device == "target" and self.name.startswith(PASS_PARTS)


class Ledger:
    """Append-only and safe to write from both workers (list appends are atomic).

    Attributes:
        now: the clock, in seconds; `perf_counter` unless time is simulated.
        queued_s: seconds that the scheduler waited because devices worked for other requests.
        drafted_s: seconds that it waited for the draft's work for this one.
        pass_ends: when the target's pass will end, where time is simulated and so it is known.
        prefilled: when the target had read the prompt, in seconds of the clock: where the speed's starts.
    """

    __slots__ = ("drafted_s", "now", "pass_ends", "prefilled", "queued_s", "spans")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.queued_s = self.drafted_s = self.prefilled = 0.0
        self.pass_ends = inf
        self.spans: list[Span] = []

    def time(self, device: str, name: str) -> "Timing":
        """Record the time spent inside the `with` block."""
        return Timing(self, device, name)


class Timing:
    """A `with` block whose time goes into a ledger, also if it raises."""

    __slots__ = ("_device", "_ledger", "_name", "_start")

    def __init__(self, ledger: Ledger, device: str, name: str) -> None:
        self._ledger, self._device, self._name = ledger, device, name
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = self._ledger.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ledger.spans.append(Span(self._device, self._name, self._start, self._ledger.now()))


class ExitGuesses:
    """What an exit says at every row: `ids` and `logprobs` `[S, K]`, best first; `layer` is its depth."""

    __slots__ = ("_compute", "_found", "layer")

    def __init__(self, layer: int, ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        self.layer = layer
        self._found: Found | None = (ids, logprobs)
        self._compute: Callable[[], Found] | None = None

    @classmethod
    def later(cls, layer: int, compute: Callable[[], "Found"]) -> Self:
        """Guesses that are worked out when they are first looked at, on the thread that looks."""
        guesses = cls.__new__(cls)
        guesses.layer, guesses._found, guesses._compute = layer, None, compute
        return guesses

    @property
    def ids(self) -> NDArray[np.int64]:
        """Token ids."""
        return self._get()[0]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Their log-probabilities."""
        return self._get()[1]

    def rows(self, start: int, stop: int) -> "ExitGuesses":
        """Those at rows `start .. stop - 1`."""
        return ExitGuesses.later(self.layer, lambda: (self.ids[start:stop], self.logprobs[start:stop]))

    def _get(self) -> "Found":
        if self._found is None:
            assert self._compute is not None
            self._found = self._compute()
        return self._found


Found = tuple[NDArray[np.int64], NDArray[np.float32]]


class TargetOutput(NamedTuple):
    """The target's answer at the asked rows: `argmax_ids [R]`, `argmax_gap [R]`, and `logits [R, V]` if asked for.

    `short_rows`, one for each row, stand for the logits where they hold all that the filters asked about keep.
    """

    argmax_ids: NDArray[np.int64]
    argmax_gap: NDArray[np.float32]
    logits: NDArray[np.floating] | None
    short_rows: Sequence[ShortRow] | None = None

    def after(self, num_rows: int) -> "TargetOutput":
        """The answer at the rows behind the first ones."""
        logits = None if self.logits is None else self.logits[num_rows:]
        short_rows = None if self.short_rows is None else self.short_rows[num_rows:]
        return TargetOutput(self.argmax_ids[num_rows:], self.argmax_gap[num_rows:], logits, short_rows)


_NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
NO_OUTPUT = TargetOutput(_NOTHING, np.empty(0, np.float32), None)
"""Of rows that were only read."""


class PassRunner(Protocol):
    """What runs the passes of one text."""

    def run(
        self,
        tokens: NDArray[np.int64],
        start: int,
        *,
        with_logits: bool | ShortlistFilter,
        ledger: Ledger,
        on_exit: Callable[[ExitGuesses], None] | None = None,
        exits: Collection[int] | None = None,
        parents: NDArray[np.int64] | None = None,
    ) -> TargetOutput:
        """Run rows `tokens [S]` at positions `start ..`; the cache before `start` is kept, anything after replaced.

        With `parents [S]`, row `r` follows row `parents[r] < r`, or the cache where that is -1: it stands one position
        behind that, and sees it and what that sees. Only rows that form one chain from row 0 on may be kept then.

        `start` is one of `TargetSession.resumable`. `with_logits` may be all that will be done with the logits: then
        `short_rows` may come in their place.
        `on_exit` hears the exits after the layers `exits`, every one where that is None; no other exit is run.
        """

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        """Like `run`, but only the cache is wanted: no exit, at most one row of logits."""


@dataclass(slots=True, kw_only=True, eq=False)
class TargetPass:
    """One session's rows, to be run alone (by calling it) or together with those of others.

    Attributes:
        with_logits: as in `run`; None where only the cache is wanted (`prefill`).
        on_start: called on the target's thread before its device starts.
    """

    session: PassRunner
    tokens: NDArray[np.int64]
    start: int
    ledger: Ledger
    with_logits: bool | ShortlistFilter | None = None
    on_start: Callable[[], None] | None = None
    on_exit: Callable[[ExitGuesses], None] | None = None
    exits: Collection[int] | None = None
    parents: NDArray[np.int64] | None = None

    @property
    def may_join(self) -> bool:
        """Whether it can be run with others: nobody listens to the exits on the way, and its rows form a chain."""
        return self.on_exit is None and self.parents is None

    def __call__(self) -> TargetOutput:
        """Run it alone."""
        if self.on_start is not None:
            self.on_start()
        if self.with_logits is None:
            self.session.prefill(self.tokens, self.start, ledger=self.ledger)
            return NO_OUTPUT
        return self.session.run(
            self.tokens,
            self.start,
            with_logits=self.with_logits,
            ledger=self.ledger,
            on_exit=self.on_exit,
            exits=self.exits,
            parents=self.parents,
        )


class Joint(NamedTuple):
    """A pass of several conversations.

    Attributes:
        num_beside: how many other owners' passes were run together with one's own.
        guess_s: what a guessed row more takes; 0 where that is not known.
        most_guesses: of each, so that it takes up to twice as long as without any.
        texts_s: what it takes without guesses and prompts; 0 where that is not known.
    """

    num_beside: int = 0
    guess_s: float = 0.0
    most_guesses: int = LONGEST_WINDOW
    texts_s: float = 0.0


ALONE = Joint()


class Ticket(Generic[Result]):
    """What a submitted job gives: its result or its error, once it is done.

    A step hands over between threads several times, so this is one lock where a `concurrent.futures.Future` is a
    condition, its lock and a list of waiters: half the time from the end of a job until its waiter runs.

    Attributes:
        error: what the job raised.
        queued_s: seconds that the job stood behind another owner's; 0 if it did not.
        joint: the pass that it was a part of.
    """

    __slots__ = ("_is_done", "_result", "_wake", "error", "joint", "queued_s")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.queued_s, self.joint = 0.0, ALONE
        self._result: Result | None = None
        self._is_done = False
        self._wake = Lock()
        self._wake.acquire()

    def finish(self, result: Result | None, error: BaseException | None = None) -> None:
        """Give the result, or the error, to whoever waits; once."""
        self._result, self.error = result, error
        self._is_done = True
        self._wake.release()

    def done(self) -> bool:
        """Whether the job is over."""
        return self._is_done

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Wait until the job is over, by default as long as it takes; False if it is not within `timeout_s`."""
        if not self._is_done and self._wake.acquire(timeout=timeout_s):
            self._wake.release()
        return self._is_done

    def result(self) -> Result:
        """Wait for the job; its result, or its error raised here."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast(Result, self._result)


class Overdue(NamedTuple):
    """A job may run for `deadline_s`; then `terminate` is called, from another thread."""

    deadline_s: float
    terminate: Callable[[], None]


class Estimate:
    """A running mean of seconds that follows the machine; None until something was measured.

    A measurement counts at most double: a machine that slept in between must not stop the draft for good.

    >>> estimate = Estimate(); estimate.observe(1.0); estimate.observe(60.0)
    >>> estimate.seconds
    1.2
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def observe(self, seconds: float) -> None:
        """Learn from one measurement."""
        if self.seconds is None:
            self.seconds = seconds
        else:
            self.seconds = TIME_MEMORY * self.seconds + (1 - TIME_MEMORY) * min(seconds, 2 * self.seconds)


class RoundClock:
    """Round times by size. A round costs what the smallest compiled size that holds its rows costs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._estimates = {size: Estimate() for size in sorted(sizes)}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that a round of `num_rows` rows took `seconds`."""
        for size, estimate in self._estimates.items():
            if size >= num_rows:
                estimate.observe(seconds)
                return

    @property
    def shortest_seconds(self) -> float:
        """What the smallest round takes; 0 until it was measured."""
        return next(iter(self._estimates.values())).seconds or 0.0

    def best_rows(self, worth_by_rows: NDArray[np.float64], seconds: float) -> int:
        """Rows of the round that is worth most for its time, of those that should be over within `seconds`; 0 if none.

        A size that was never measured is taken where there is one: that is how it gets measured.

        Args:
            worth_by_rows: `[rows + 1]` what rounds of `0 ..` rows are worth; rounds of more are worth the last.
            seconds: what is left.

        With rounds of 4 rows in 1 ms and of 8 in 1.5 ms, 8 rows are taken if the second four are worth more than half
        of the first four:

        >>> clock = RoundClock([4, 8, 16])
        >>> clock.observe(4, 0.001); clock.observe(8, 0.0015); clock.observe(16, 10.0)
        >>> clock.best_rows(np.array([0, 1, 2, 3, 4, 4.5, 5, 5.5, 6.5]), 1.0)
        8
        >>> clock.best_rows(np.array([0, 1, 2, 3, 4, 4.5]), 1.0), clock.best_rows(np.array([0, 1]), 0.0)
        (4, 0)
        """
        best, best_rate = 0, 0.0
        for size, estimate in self._estimates.items():
            worth = float(worth_by_rows[min(size, len(worth_by_rows) - 1)])
            if estimate.seconds is None:
                best, best_rate = (size, float("inf")) if worth else (best, best_rate)
            elif estimate.seconds <= seconds and (rate := worth / max(estimate.seconds, 1e-9)) > best_rate:
                best, best_rate = size, rate
        return best


class AcceptanceRate:
    """How often a guess is right, lately: the share of tried window tokens that were accepted."""

    def __init__(self) -> None:
        self.value = _FIRST_RATE

    def observe(self, num_window: int, num_accepted: int) -> None:
        """Learn from a verified window: accepted tokens were right, the next one (if any) was wrong."""
        for row in range(min(num_accepted + 1, num_window)):
            self.value = RATE_MEMORY * self.value + (1 - RATE_MEMORY) * (row < num_accepted)

    @property
    def log_odds(self) -> float:
        """Those of the rate; so few tokens tell it from never or always by half of one's share at most.

        >>> rate = AcceptanceRate(); rate.observe(300, 300); round(rate.log_odds, 2)
        3.66
        """
        least = (1 - RATE_MEMORY) / 2
        rate = min(max(self.value, least), 1 - least)
        return log(rate / (1 - rate))
