"""The draft's chain of known tokens (committed text, head token, window) and what the draft thinks comes next.

Cache slot `p` holds the token at position `p` for every fed chain token; slots after the chain are scratch.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import DraftSession, RowBlock, TipGuesses, check_guesses

NO_TOKENS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_SLACK = 64  # a window may be known past the last slot that could ever be fed


class DraftChain:
    """Tokens, cache fill and next-token candidates of the chain.

    Attributes:
        num_fed: leading chain tokens whose keys and values are cached.
        num_known: known chain tokens.
    """

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.num_fed = 0
        self.num_known = 0
        self._num_noted = 0
        size, width = session.capacity + _SLACK, session.shape.num_candidates
        self._tokens = np.zeros(size, dtype=np.int64)
        self._next_ids = np.zeros((size, width), dtype=np.int64)
        self._next_logprobs = np.full((size, width), -np.inf, dtype=np.float32)

    @property
    def head(self) -> int:
        """Position of the last known token."""
        return self.num_known - 1

    def restart(self, tokens: NDArray[np.int64]) -> None:
        """Take a new text; what is cached stays cached up to the first difference."""
        self.num_fed = longest_common_prefix(self._tokens[: self.num_fed], tokens[:-1])
        self.num_known = len(tokens)
        self._tokens[: len(tokens)] = tokens
        self._next_logprobs[: self._num_noted] = -np.inf
        self._num_noted = 0
        self.session.forget_after(self.num_fed)

    def forget(self) -> None:
        """Drop everything, after a failure that left the cache unknown."""
        self.num_fed = self.num_known = 0

    def token(self, position: int) -> int:
        """The chain token at a position."""
        return int(self._tokens[position])

    def cut(self, num_known: int) -> None:
        """Forget the tokens from position `num_known` on: a rollback by number, nothing moves."""
        self.num_known = num_known
        self.num_fed = min(self.num_fed, num_known)
        first = max(num_known - 1, 0)
        self._next_logprobs[first : self._num_noted] = -np.inf
        self._num_noted = min(self._num_noted, first)

    def append(self, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Make tokens known after the last one; they are not fed yet."""
        self._tokens[self.num_known : self.num_known + len(tokens)] = tokens
        self.num_known += len(tokens)

    def block(self, stop: int) -> RowBlock:
        """Rows for the unfed tokens before position `stop`."""
        return RowBlock(self._tokens[self.num_fed : stop].tolist(), self.num_fed, self.num_fed)

    def feed(self, stop: int) -> None:
        """Cache the chain up to position `stop`, in prefill chunks."""
        while self.num_fed < stop:
            chunk_stop = min(self.num_fed + self.session.prefill_rows, stop)
            self.run([self.block(chunk_stop)], [chunk_stop - self.num_fed - 1])
            self.keep(chunk_stop)

    def keep(self, stop: int) -> None:
        """Put the leading rows of the last pass into the cache as chain rows `num_fed .. stop - 1`."""
        if stop > self.num_fed:
            self.session.keep_rows(range(stop - self.num_fed), range(self.num_fed, stop))
            self.num_fed = stop

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        """One draft pass, its answer checked.

        Raises:
            DeviceError: the device failed, or answered what no draft answers.
        """
        return check_guesses(self.session.run(blocks, tip_rows), len(tip_rows), self.session.shape)

    def note_candidates(
        self, position: int, ids: Iterable[NDArray[np.int64]], logprobs: Iterable[NDArray[np.float32]]
    ) -> None:
        """Remember what the draft thinks comes after each position from `position` on: `n` times `[m]`, best first."""
        for place, of_ids, of_logprobs in zip(count(position), ids, logprobs, strict=False):
            self._next_ids[place] = of_ids
            self._next_logprobs[place] = of_logprobs
            self._num_noted = max(self._num_noted, place + 1)

    def candidates(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What the draft thinks comes after positions `start .. stop - 1`: ids and log-probabilities `[n, m]`.

        Rows about which it knows nothing have log-probability `-inf`.
        """
        return self._next_ids[start:stop], self._next_logprobs[start:stop]


def longest_common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Number of leading equal tokens.

    >>> longest_common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
    2
    """
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
