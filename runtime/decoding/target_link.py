"""The scheduler's line to the target worker: chunked prefill, passes over windows, the record of what is cached.

Owns, too, which guesses of a window the answer accepts: a walk along the target's own choices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import (
    ExitGuesses,
    HeadGuesses,
    Kept,
    Overdue,
    TargetOutput,
    TargetPass,
    TargetSession,
    Ticket,
)
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.devices.company import Worker
from mirrorsd.runtime.draft.tree import longest_common_prefix
from mirrorsd.runtime.policy.siblings import NO_SIBLINGS, Siblings
from mirrorsd.runtime.sampling.chooser import Choice

Result = TypeVar("Result")
_TERMINATE_S = 2.0
"""Seconds that a device has to end a pass when it is asked to."""


class RowReader(Protocol):
    """Reads what the target's passes leave behind of the prompt's rows."""

    def num_read(self, tokens: NDArray[np.int64]) -> int:
        """How many rows of a text it has read before; those behind them must pass through the target again."""

    def read(self, start: int, stop: int) -> None:
        """Rows `start .. stop - 1` have passed, and no other pass has begun since."""


class TargetLink:
    """Runs the target for one request at a time; its cache survives from request to request."""

    def __init__(self, session: TargetSession, worker: Worker) -> None:
        self.context = session.context
        self.vocab_size = session.vocab_size
        self.near_tie_gap, self.row_group = session.near_tie_gap, session.row_group
        self.takes_trees, self.heads = session.takes_trees, session.heads
        self._session, self._worker = session, worker
        self._cached = np.zeros(session.context, dtype=np.int64)
        self._num_cached = 0

    def prefill(self, request: Request, reader: RowReader | None = None) -> None:
        """Feed all tokens but the last, in chunks, after the longest common prefix with what is cached already.

        What is cached and `reader` has not read is fed again; so is what is cached behind the last place where the
        target can go on.
        """
        tokens = request.tokens[:-1]
        start = longest_common_prefix(self.cached, tokens)
        if reader is not None:
            start = min(start, reader.num_read(request.tokens))
        start = self._session.resumable(start)
        request.num_reused = start
        self._num_cached = start  # before the first row is written over: an interrupted chunk leaves anything behind
        while start < len(tokens):
            request.raise_if_cancelled()
            most = self._worker.chunk_rows(request.ledger, request.speculation.prefill_rows)
            stop = min(start + most, len(tokens))
            chunk = tokens[start:stop]
            job = TargetPass(session=self._session, tokens=chunk, start=start, ledger=request.ledger)
            self.result(request, self._worker.submit(job, request.ledger))
            self._remember(start, chunk)
            if reader is not None:
                reader.read(start, stop)
            start = stop

    def num_cached(self, request: Request, most: int | None = None) -> int:
        """How many leading tokens of its text, at most `most`, need not be fed again for the target's sake."""
        found = longest_common_prefix(self.cached, request.tokens[:-1])
        return self._session.resumable(found if most is None else min(found, most))

    def guess(
        self,
        request: Request,
        kind: str,
        start: int,
        tokens: NDArray[np.int64],
        noise: NDArray[np.float32] | None,
        rows: NDArray[np.int64] | None,
    ) -> HeadGuesses:
        """Run a head over rows of the last pass, and wait: see `TargetSession.guess`.

        Raises:
            Cancelled: the request was cancelled meanwhile.
            DeviceError: as `result`.
        """
        job = partial(self._session.guess, kind, tokens, start, noise=noise, rows=rows, ledger=request.ledger)
        overdue = Overdue(request.speculation.target_deadline_s, self._session.terminate)
        ticket = self._worker.perform(job, request.ledger, overdue)
        found = self.result(request, ticket)
        request.ledger.queued_s += ticket.queued_s
        return found

    def submit(
        self,
        request: Request,
        head: int,
        window: NDArray[np.int64],
        siblings: Siblings = NO_SIBLINGS,
        num_again: int = 0,
        on_start: Callable[[], None] | None = None,
        on_exit: Callable[[ExitGuesses], None] | None = None,
    ) -> Ticket[TargetOutput]:
        """Start a pass over the `num_again` tokens before the head token, it, the window, and its siblings.

        Rows are padded where equal row counts are asked for. Exits are heard of the head token's and the window's rows.
        Where the caller has nothing to do meanwhile, the pass may be over when this returns. `on_start` and `on_exit`
        run on the target's thread, just before its device starts and between its stages: while
        the device works, that thread leaves the interpreter to whom they woke.
        """
        start, stop = head - num_again, num_again + 1 + len(window)
        rows = np.concatenate([request.tokens[start : head + 1], window, siblings.tokens])
        self._num_cached = min(self._num_cached, start)
        padded = request.speculation.pad_rows_to
        if len(rows) < padded <= self.context - start:
            rows = np.concatenate([rows, np.zeros(padded - len(rows), dtype=np.int64)])
        job = TargetPass(
            session=self._session,
            tokens=rows,
            start=start,
            ledger=request.ledger,
            with_logits=request.chooser.filters or request.chooser.needs_logits,
            on_start=on_start,
            on_exit=on_exit if len(rows) == 1 + len(window) else _of_rows(on_exit, num_again, stop),
            exits=None if request.speculation.exits == "all" else request.speculation.exits,
            parents=_parents(num_again, stop, siblings) if len(siblings.tokens) else None,
        )
        if request.chooser.draws_ahead(self.vocab_size):
            return self._worker.submit(job, request.ledger)
        overdue = Overdue(request.speculation.target_deadline_s, self._session.terminate)
        return self._worker.perform(job, request.ledger, overdue)

    def result(self, request: Request, ticket: Ticket[Result]) -> Result:
        """Wait for a pass of this session.

        Raises:
            Cancelled: the request was cancelled meanwhile.
            DeviceError: the pass failed, or lasts longer than `target_deadline_s`.
        """
        deadline_s = request.speculation.target_deadline_s
        if not self._worker.wait(ticket, deadline_s, request.is_cancelled):
            self._session.terminate()
            if not ticket.wait(_TERMINATE_S):
                request.raise_if_cancelled()
                raise DeviceError(
                    f"The target's device has not answered for {deadline_s:g} s (target_deadline_s). Load the bundle "
                    "again; if its passes really take that long, give it more time."
                )
        if isinstance(ticket.error, Exception):  # an interrupt, or an exit, is the caller's own
            request.raise_if_cancelled()  # it ended early for that reason
        return ticket.result()

    @property
    def cached(self) -> NDArray[np.int64]:
        """The tokens whose rows are cached."""
        return self._cached[: self._num_cached]

    def read_cache(self, num_rows: int) -> Kept:
        """Copies of the first rows; see `TargetSession.read_cache`. Between two requests' steps only."""
        return self._worker.run(partial(self._session.read_cache, num_rows))

    def write_cache(self, tokens: NDArray[np.int64], kept: Kept) -> None:
        """Take over what was kept of a text; see `TargetSession.write_cache`. Between two requests' steps only."""
        self._num_cached = 0
        self._worker.run(partial(self._session.write_cache, kept))
        self._remember(0, tokens)

    def follow(self, other: "TargetLink") -> bool:
        """Take over what another conversation has cached, where passes are shared; whether they are."""
        company = self._worker.company
        if company is None:
            return False
        self._num_cached = 0
        copy = partial(company.batch.copy, other._session, self._session)
        self._remember(0, self._worker.run(lambda: _copied(other.cached, copy)))
        return True

    def forget(self) -> None:
        """Take nothing of what is cached for read any more. Between two requests' steps only."""
        self._num_cached = 0

    def terminate(self) -> None:
        """Ask the device to end the pass that is running, from any thread; no pass, nothing happens."""
        self._session.terminate()

    def serves_others(self, request: Request) -> bool:
        """Whether the target is at work for another conversation, or will be first."""
        return self._worker.serves_others(request.ledger)

    def keep(self, request: Request, num_cached: int) -> None:
        """Note that the first `num_cached` positions of the committed text are cached."""
        start = self._num_cached
        self._remember(start, request.tokens[start:num_cached])

    def _remember(self, start: int, tokens: NDArray[np.int64]) -> None:
        self._cached[start : start + len(tokens)] = tokens
        self._num_cached = start + len(tokens)


def _copied(tokens: NDArray[np.int64], copy: Callable[[int], None]) -> NDArray[np.int64]:
    """Runs on the target's thread, where what is noted as cached stays so."""
    found = tokens.copy()
    copy(len(found))
    return found


def _of_rows(
    on_exit: Callable[[ExitGuesses], None] | None, start: int, stop: int
) -> Callable[[ExitGuesses], None] | None:
    """Hear exits of rows `start .. stop - 1` alone."""
    return None if on_exit is None else lambda guesses: on_exit(guesses.rows(start, stop))


def _parents(num_again: int, num_chained: int, siblings: Siblings) -> NDArray[np.int64]:
    """The row that each row of a pass follows: the first `num_chained` each other, siblings those of the window.

    >>> _parents(1, 4, Siblings(np.array([7, 8]), np.array([0, 1]))).tolist()
    [-1, 0, 1, 2, 1, 2]
    """
    return np.concatenate([np.arange(-1, num_chained - 1), num_again + siblings.parents])


ChooseRow = Callable[[int, Sequence[int]], Choice]
"""The target's choice behind a row, and the guesses that lead there from the head token on."""


class Acceptance(NamedTuple):
    """`num_accepted` leading window tokens equal the target's choices; `next_token` is the correction or bonus.

    `aside` are siblings that were right behind these, which stand in `rows_aside`, counted from the head token's row.
    """

    num_accepted: int
    next_token: int
    gaps: tuple[float, ...]
    aside: tuple[int, ...] = ()
    rows_aside: tuple[int, ...] = ()

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens behind the accepted part of the window."""
        return (*self.aside, self.next_token)

    @property
    def num_right(self) -> int:
        """Guesses that were right."""
        return self.num_accepted + len(self.aside)


def accept_window(window: NDArray[np.int64], choose_row: Callable[[int], Choice]) -> Acceptance:
    """Verify a window against the target, row by row, stopping at the first difference.

    Row `i` predicts what follows the head token and `i` window tokens, so its choice is compared with `window[i]`.
    `choose_row(i)` is called for rows `0 .. num_accepted` only: later rows saw a text that is not the target's.

    With window `[7, 8, 9]` and target choices `[7, 8, 5, ...]` two tokens are accepted and 5 is the correction:

    >>> choices = [7, 8, 5, 1]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (2, 5)

    With choices `[7, 8, 9, 4]` all three are accepted and 4 is the bonus:

    >>> choices = [7, 8, 9, 4]
    >>> accept_window(np.array([7, 8, 9]), lambda i: Choice(choices[i], 1.0))[:2]
    (3, 4)
    """
    gaps = []
    for row, token in enumerate((*window.tolist(), None)):
        choice = choose_row(row)
        gaps.append(choice.gap)
        if choice.token != token:
            return Acceptance(row, choice.token, tuple(gaps))
    raise AssertionError("unreachable: no choice equals the None after the window")


def accept_tree(window: NDArray[np.int64], siblings: Siblings, choose: ChooseRow) -> Acceptance:
    """As `accept_window`, with siblings: the target's choice behind a row picks the row that follows, if there is one.

    `choose(row, path)` is asked for rows of the text alone; `path` are the guesses that lead there. Row 0 is the head
    token's, the window's rows follow, then the siblings'.

    Window `[7, 8]` has 5 beside its 8. The target says 7, then 5, and 4 behind that, in row 3:

    >>> choices = [7, 5, 0, 4]
    >>> accept_tree(np.array([7, 8]), Siblings(np.array([5]), np.array([1])), lambda row, _: Choice(choices[row], 1.0))
    Acceptance(num_accepted=1, next_token=4, gaps=(1.0, 1.0, 1.0), aside=(5,), rows_aside=(3,))
    """
    rows = {(row, token): row + 1 for row, token in enumerate(window.tolist())}
    beside = zip(siblings.parents.tolist(), siblings.tokens.tolist(), strict=True)
    rows |= {place: len(window) + 1 + number for number, place in enumerate(beside)}
    path, taken, gaps = list[int](), list[int](), list[float]()
    row, num_accepted = 0, 0
    while True:
        choice = choose(row, path)
        gaps.append(choice.gap)
        following = rows.get((row, choice.token))
        if following is None:
            aside = tuple(path[num_accepted:]), tuple(taken[num_accepted:])
            return Acceptance(num_accepted, choice.token, tuple(gaps), *aside)
        row = following
        path.append(choice.token)
        taken.append(row)
        num_accepted += row <= len(window)
