"""Several conversations at once: sessions of one pipeline, handed out to whoever goes on with what they have cached."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from operator import itemgetter
from reprlib import repr as shortened
from threading import get_ident
from time import perf_counter, sleep
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import DeviceError, GenerationError
from mirrorsd.runtime.backends.protocol import MOST_SEATED
from mirrorsd.runtime.draft.tree import longest_common_prefix
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.runtime.turns import GRACE_S, LOOK_S
from mirrorsd.texts.config import CancelToken
from mirrorsd.texts.setting_rules import checked, number

_TIMEOUT = number(lambda seconds: seconds >= 0, "0 or more seconds")


class _Asked:
    """What a session was taken for, when, on which thread, and until when that is about to be read."""

    def __init__(self, prompt: Sequence[int]) -> None:
        found = np.asarray(prompt)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise GenerationError(f"token_ids is {shortened(prompt)}; allowed: a list of whole numbers.")
        self.prompt, self.thread = found.astype(np.int64), get_ident()
        self.taken_at = self.begins_until = inf

    def common_prefix(self, tokens: NDArray[np.int64]) -> int:
        """How many leading tokens of a prompt are about to be read: not the last one, which is the first step's."""
        return longest_common_prefix(self.prompt[:-1], tokens) if perf_counter() < self.begins_until else 0


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
        self._sessions = [open_session() for _ in range(num_seats)]
        self._worth = dict.fromkeys(self._sessions, (0, 0.0))  # and when they were used
        self._last_worth = 0  # of the last conversation that was let go
        # An interrupt may fall between any two lines of those who take and give back: what nobody holds any more is
        # free all the same. Nobody goes through it: garbage that is collected meanwhile may give a seat back.
        self._asked: WeakValueDictionary[MirrorSession, _Asked] = WeakValueDictionary()
        self._can_share, self._process = self._sessions[0].follow(self._sessions[-1], 0), os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def num_free(self) -> int:
        """Sessions that nobody has taken."""
        return self.num_seats - len(self._asked)

    @contextmanager
    def take(
        self, token_ids: Sequence[int], timeout_s: float | None = None, cancel: CancelToken | None = None
    ) -> Iterator[MirrorSession]:
        """A session for a prompt with these ids, until the end of the `with` block.

        Args:
            token_ids: what will be read (`MirrorPipeline.encode`).
            timeout_s: how long to wait for a free one, and for what another one is reading; 0: not at all, None: for
                as long as it takes. What is copied waits for the pass that the target is at.
            cancel: ends the waiting.

        Raises:
            Cancelled: `cancel` says so.
            ConfigError: `timeout_s` is no number of 0 or more.
            GenerationError: the sessions are closed, or another process's; or these are no ids.
            TimeoutError: all are taken.
        """
        asked, cancel = _Asked(token_ids), cancel or CancelToken()
        until = inf if timeout_s is None else perf_counter() + checked(_TIMEOUT, "take", "timeout_s", timeout_s)
        try:
            with self._lock:
                while not (free := self._free()):
                    if perf_counter() >= until:
                        raise TimeoutError(f"All {self.num_seats} seats are taken, and none came free in time.")
                    self._changed.wait(min(until - perf_counter(), LOOK_S))
                    cancel.check()
                session = self._best(free, asked.prompt)
                asked.taken_at = perf_counter()
                self._asked[session] = asked
            self._share(session, asked, until, cancel)
            yield session
        finally:
            self._give_back(asked)

    def close(self) -> None:
        """Close all sessions, those that are taken too."""
        for session in self._sessions:
            session.begin_to_close()
        for session in self._sessions:
            session.close()

    def _free(self) -> list[MirrorSession]:
        """Sessions that may be taken."""
        if all(session.is_closed for session in self._sessions):
            raise GenerationError("These seats are closed: load the bundle again, or open new ones.")
        return [one for one in self._sessions if not (one in self._asked or one.is_closed)]

    def _give_back(self, asked: _Asked) -> None:
        with self._lock:
            for session in [one for one in self._sessions if self._asked.get(one) is asked]:
                self._worth[session] = self._last_worth + session.num_cached_tokens, perf_counter()
                del self._asked[session]
            self._changed.notify()

    def _share(self, session: MirrorSession, asked: _Asked, until: float, cancel: CancelToken) -> None:
        """Let a session have what another one has cached of a prompt, or will have, if that saves a part of it."""
        tokens = asked.prompt
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
        asked.begins_until = perf_counter() + GRACE_S

    def _is_coming(self, session: MirrorSession, tokens: NDArray[np.int64]) -> bool:
        """Whether one that was taken before reads more of these tokens than any has cached, or is about to."""
        least = max(other.common_prefix(tokens) for other in self._sessions) + MOST_SEATED
        with self._lock:
            taken = {other: asked for other in self._sessions if (asked := self._asked.get(other)) is not None}
        own = taken.pop(session)
        coming = (
            max(other.common_prefix(tokens, is_read=False), asked.common_prefix(tokens))
            for other, asked in taken.items()
            if asked.taken_at < own.taken_at
        )
        is_alone_here = all(asked.thread != get_ident() for asked in taken.values())
        return is_alone_here and any(found >= least for found in coming)

    def _best(self, free: Sequence[MirrorSession], tokens: NDArray[np.int64]) -> MirrorSession:
        best = max(free, key=lambda session: (session.common_prefix(tokens), -self._worth[session][1]))
        if 2 * best.common_prefix(tokens) >= max(best.num_cached_tokens, 1):
            return best
        found = min(free, key=lambda session: (session.num_cached_tokens > 0, self._worth[session]))
        if found.num_cached_tokens:
            self._last_worth = self._worth[found][0]
        return found
