"""Several conversations at once: sessions of one pipeline, handed out to whoever goes on with what they have cached."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from math import inf
from operator import itemgetter
from threading import get_ident
from time import perf_counter, sleep

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.protocol import MOST_SEATED
from mirrorsd.runtime.draft.tree import longest_common_prefix
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.runtime.turns import GRACE_S, LOOK_S
from mirrorsd.texts.config import CancelToken


class _Asked:
    """What a session was taken for, on which thread, and until when that is about to be read."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.tokens = tokens[:-1]  # the last one is the first step's
        self.thread, self.begins_until = get_ident(), inf

    def common_prefix(self, tokens: NDArray[np.int64]) -> int:
        """How many leading tokens of a prompt are about to be read."""
        return longest_common_prefix(self.tokens, tokens) if perf_counter() < self.begins_until else 0


class Seats:
    """A fixed number of sessions. Thread-safe.

    A text is given the free session that has cached the longest beginning of it, if that is at least half of what the
    session has cached: then it is the same conversation. Otherwise it is given one that was never used, and otherwise
    the one that is least worth keeping: of short conversations, and of those that were used long ago (GreedyDual, Young
    1994). So an agent's small requests in between do not cost it its long conversation. What another session has cached
    of the text's beginning, as a system's message, is copied from there: a token's rows are the same wherever they were
    computed. Who comes while another one reads that, or is about to, waits for it; a thread that has another seat does
    not, as it may be what the other one waits for.

    Attributes:
        num_seats: how many sessions there are.
        bytes_per_seat: most memory that the caches of one take, on both devices together.
    """

    def __init__(self, open_session: Callable[[], MirrorSession], num_seats: int, bytes_per_seat: int) -> None:
        """Open all sessions."""
        self.num_seats, self.bytes_per_seat = num_seats, bytes_per_seat
        self._free: list[MirrorSession] = [open_session() for _ in range(num_seats)]  # used longest ago first
        self._sessions = list(self._free)
        self._worth: dict[MirrorSession, int] = dict.fromkeys(self._sessions, 0)
        self._last_worth = 0  # of the last conversation that was let go
        self._asked: dict[MirrorSession, _Asked] = {}  # in the order in which they were taken
        self._can_share, self._process = self._sessions[0].follow(self._sessions[-1], 0), os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def num_free(self) -> int:
        """Sessions that nobody has taken."""
        return len(self._free)

    @contextmanager
    def take(
        self, token_ids: Sequence[int], timeout_s: float | None = None, cancel: CancelToken | None = None
    ) -> Iterator[MirrorSession]:
        """A session for a prompt with these ids, until the end of the `with` block.

        Args:
            token_ids: what will be read (`MirrorPipeline.encode`).
            timeout_s: how long to wait for a free one, and for what another one is reading; 0: not at all, None: for
                as long as it takes.
            cancel: ends the waiting.

        Raises:
            Cancelled: `cancel` says so.
            GenerationError: the sessions are closed, or another process's.
            TimeoutError: all are taken.
        """
        tokens, cancel = np.asarray(token_ids, dtype=np.int64), cancel or CancelToken()
        until = inf if timeout_s is None else perf_counter() + timeout_s
        session = self._take(tokens, until, cancel)
        try:
            self._share(session, tokens, until, cancel)
            yield session
        finally:
            with self._lock:
                self._free.append(session)
                self._asked.pop(session, None)
                self._worth[session] = self._last_worth + session.num_cached_tokens
                self._changed.notify()

    def close(self) -> None:
        """Close all sessions, those that are taken too."""
        for session in self._sessions:
            session.begin_to_close()
        for session in self._sessions:
            session.close()

    def _take(self, tokens: NDArray[np.int64], until: float, cancel: CancelToken) -> MirrorSession:
        with self._lock:
            while not self._free:
                if perf_counter() >= until:
                    raise TimeoutError(f"All {self.num_seats} seats are taken, and none came free in time.")
                self._changed.wait(min(until - perf_counter(), LOOK_S))
                cancel.check()
            session = self._best(tokens)
            self._free.remove(session)
            self._asked[session] = _Asked(tokens)
            return session

    def _share(self, session: MirrorSession, tokens: NDArray[np.int64], until: float, cancel: CancelToken) -> None:
        """Let a session have what another one has cached of a prompt, or will have, if that saves a part of it."""
        if self._can_share and os.getpid() == self._process:  # nobody reads on in a fork
            while perf_counter() < until and self._is_coming(session, tokens):
                sleep(LOOK_S)
                cancel.check()
            num_common, found = max(
                ((other.common_prefix(tokens), other) for other in self._sessions), key=itemgetter(0)
            )
            if num_common >= session.common_prefix(tokens) + MOST_SEATED:
                with suppress(DeviceError):  # then it is read
                    session.follow(found, num_common)
        self._asked[session].begins_until = perf_counter() + GRACE_S

    def _is_coming(self, session: MirrorSession, tokens: NDArray[np.int64]) -> bool:
        """Whether one that was taken before reads more of these tokens than any has cached, or is about to."""
        least = max(other.common_prefix(tokens) for other in self._sessions) + MOST_SEATED
        with self._lock:
            others = [one for one in self._asked.items() if one[0] is not session]
            before = list(takewhile(lambda one: one[0] is not session, self._asked.items()))
        coming = (
            max(other.common_prefix(tokens, is_read=False), asked.common_prefix(tokens)) for other, asked in before
        )
        return all(asked.thread != get_ident() for _, asked in others) and any(found >= least for found in coming)

    def _best(self, tokens: NDArray[np.int64]) -> MirrorSession:
        known = [session for session in self._free if session.num_cached_tokens]
        if known:
            best = max(known, key=lambda session: session.common_prefix(tokens))
            if 2 * best.common_prefix(tokens) >= best.num_cached_tokens:
                return best
        unused = [session for session in self._free if not session.num_cached_tokens]
        if unused:
            return unused[0]
        found = min(self._free, key=self._worth.__getitem__)
        self._last_worth = self._worth[found]
        return found
