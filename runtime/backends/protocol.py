"""The devices as the runtime sees them: sessions of draft and target, passes over rows, tickets for what they say.

`TargetSession` is the seam: ONNX Runtime implements it (`onnxruntime/target`), tests do with a handler (`fake`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Head
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.sampling.chooser import NoiseSource
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.short_rows import ShortRow

Result = TypeVar("Result")
MOST_SEATED = 8
"""Rows that each conversation may bring to a pass of several: a window and the token before it. One may have more."""
Progress = Callable[[str, float], None]
"""Takes what is being done, and what share of it is done, 0..1."""


class RowBlock(NamedTuple):
    """Consecutive rows of one pass that form a causal chain.

    A row of the block sees cache slots `0 .. chain_visible - 1`, the cache slots in `extra_slots`, the first
    `lead_rows` rows of the pass (`lead_rows` is 0 for the block that starts the pass), and its block up to itself.
    """

    tokens: Sequence[int]
    first_position: int
    chain_visible: int
    extra_slots: Sequence[int] = ()
    lead_rows: int = 0


class TipGuesses(NamedTuple):
    """What a pass predicts at its tip rows: `ids` and `logprobs` `[R, 1 + s, m]`, best first (by both, if with noise).

    `[r, 0]` is the token after tip `r`, `[r, j]` the token `j` further on.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


class DraftSession(Protocol):
    """One draft on one device, with one cache."""

    shape: DraftShape
    round_sizes: tuple[int, ...]
    """Row counts that are worth filling: a round costs as much as the next larger of these."""
    max_tips: int
    prefill_rows: int
    capacity: int

    def is_prepared(self, num_slots: int) -> bool:
        """Whether all that a text of up to `num_slots` cache slots will use is ready. From any thread."""

    def prepare(self, num_slots: int) -> None:
        """Get all that ready; may take long. From any thread, beside passes of this session and of others."""

    def use_noise(self, source: NoiseSource | None) -> None:
        """Rank the candidates of a request with the noise of its sampling, where the draft can; None: without."""

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """Run one pass. The rows' keys and values stay available to `keep_rows` until the next pass."""

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Write keys and values of rows of the last pass into cache slots."""

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy cache slots (all read before any is written, so ranges may overlap)."""

    def forget_after(self, num_slots: int) -> None:
        """A text begins of which only the first `num_slots` slots are cached: the others will be written first."""

    def close(self) -> None:
        """Release the device."""


class DraftModel(Protocol):
    """A loaded draft, from which sessions are made."""

    def new_session(self) -> DraftSession:
        """A session with a cache of its own."""

    def describe(self) -> str:
        """One line: what runs where."""


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
        if not num_rows:
            return self
        logits = None if self.logits is None else self.logits[num_rows:]
        short_rows = None if self.short_rows is None else self.short_rows[num_rows:]
        return TargetOutput(self.argmax_ids[num_rows:], self.argmax_gap[num_rows:], logits, short_rows)


_NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
NO_OUTPUT = TargetOutput(_NOTHING, np.empty(0, np.float32), None)
"""Of rows that were only read."""


class HeadGuesses(NamedTuple):
    """What a head guesses, best first: `ids` and `logprobs` `[K, m]`; `[:, 0]` is one chain behind the head token."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


class Kept(NamedTuple):
    """What a target keeps of a text's first `num_rows` tokens.

    `rows` are keys and values by layer, each `[1, heads, num_rows, size]`; `states` those of recurrent layers, whose
    sizes do not depend on the text.
    """

    num_rows: int
    rows: Sequence[NDArray[Any]]
    states: Sequence[NDArray[Any]] = ()


class TargetSession(Protocol):
    """The target on one device, with one cache of `context` rows; rolled back by number.

    Attributes:
        row_group: rows are computed so many at a time: a pass takes as long as if its last group were full.
        heads: the heads that can run beside it, by kind.
        takes_trees: whether rows of a pass may have `parents`.
    """

    context: int
    vocab_size: int
    near_tie_gap: float
    row_group: int
    takes_trees: bool
    heads: Mapping[str, Head]

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

        `start` is one of `resumable`. `with_logits` may be all that will be done with the logits: then `short_rows` may
        come in their place.
        `on_exit` hears the exits after the layers `exits`, every one where that is None; no other exit is run.
        """

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        """Like `run`, but only the cache is wanted: no exit, at most one row of logits."""

    def resumable(self, position: int) -> int:
        """The last position, at most `position`, at which `run` and `prefill` can start in the text that is cached.

        That is `position` itself, but for recurrent layers: these keep states at some places only.
        """

    def guess(
        self,
        kind: str,
        tokens: NDArray[np.int64],
        start: int,
        *,
        noise: NDArray[np.float32] | None = None,
        rows: NDArray[np.int64] | None = None,
        ledger: Ledger,
    ) -> HeadGuesses:
        """Run a head over `R` rows of the last pass, which stood at positions `start ..`: by itself the first ones.

        Args:
            kind: which of `heads`.
            tokens: `[R]`, the token that follows each row.
            start: the head's own caches are kept before it, and replaced behind.
            noise: `[K, V]`, what competes with its logits; None for nothing.
            rows: `[R]`, which rows; others than the first only where the session `takes_trees`.
            ledger: where the time goes.
        """
        raise DeviceError("Heads run on ONNX Runtime; this device map's target has none.")

    def read_cache(self, num_rows: int) -> Kept:
        """Copies of what is kept of the first rows; `num_rows` is one of `resumable`.

        Raises:
            DeviceError: the caches' kind of number is none that the host has.
        """

    def write_cache(self, kept: Kept) -> None:
        """Take over what `read_cache` gave."""

    def terminate(self) -> None:
        """Ask the pass that is running to end early with a `DeviceError`. May be called from any thread."""

    def close(self) -> None:
        """Release the device."""


@dataclass(slots=True, kw_only=True, eq=False)
class TargetPass:
    """One session's rows, to be run alone (by calling it) or together with those of others.

    Attributes:
        with_logits: as in `TargetSession.run`; None where only the cache is wanted (`TargetSession.prefill`).
        on_start: called on the target's thread before its device starts.
    """

    session: TargetSession
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


class Ticket(Generic[Result]):
    """What a submitted job gives: its result or its error, once it is done.

    A step hands over between threads several times, so this is one lock where a `concurrent.futures.Future` is a
    condition, its lock and a list of waiters: half the time from the end of a job until its waiter runs.

    Attributes:
        error: what the job raised.
        queued_s: seconds that the job stood behind another owner's; 0 if it did not.
        num_beside: how many other owners' passes were run together with this one.
    """

    __slots__ = ("_is_done", "_result", "_wake", "error", "num_beside", "queued_s")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.queued_s, self.num_beside = 0.0, 0
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


class TargetBatch(Protocol):
    """Runs the rows of several sessions in one pass; every row has the bits that it has alone.

    Attributes:
        num_slots: how many sessions it takes at once.
    """

    num_slots: int

    @property
    def is_given_up(self) -> bool:
        """Whether the last pass was ended early because none of its sessions wanted it any more."""

    def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
        """Whether a pass can be run together with these, which can; on the target's thread."""

    def run(self, passes: Sequence[TargetPass]) -> list[TargetOutput]:
        """Run passes of different sessions, which it `takes` together, on the target's thread.

        Raises:
            DeviceError: the device failed. No row counts then, and each pass may be run alone.
        """

    def copy(self, source: TargetSession, into: TargetSession, num_rows: int) -> None:
        """Copy the first rows of a session's cache into another's, on the target's thread."""


class TargetModel(Protocol):
    """A loaded target, from which sessions are made."""

    def new_session(self) -> TargetSession:
        """A session with a cache of its own."""

    def open_batch(self, num_slots: int) -> TargetBatch | None:
        """What runs several sessions together; None where this target runs one after another. Takes seconds."""

    def describe(self) -> str:
        """One line: what runs where."""
