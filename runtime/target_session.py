"""The target as the runtime sees it: one pass over rows, with the exits' proxies delivered on the way.

`TargetSession` is the seam: ONNX Runtime implements it (`onnx_target`), tests implement it with a handler (`fake`).
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.ledger import Ledger


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

    def _get(self) -> "Found":
        if self._found is None:
            assert self._compute is not None
            self._found = self._compute()
        return self._found


Found = tuple[NDArray[np.int64], NDArray[np.float32]]


class TargetOutput(NamedTuple):
    """The target's answer at the asked rows: `argmax_ids [R]`, `argmax_gap [R]`, and `logits [R, V]` if asked for."""

    argmax_ids: NDArray[np.int64]
    argmax_gap: NDArray[np.float32]
    logits: NDArray[np.floating] | None


class TargetSession(Protocol):
    """The target on one device, with one cache of `context` rows; rolled back by number.

    Attributes:
        row_group: rows are computed so many at a time: a pass takes as long as if its last group were full.
    """

    context: int
    vocab_size: int
    near_tie_gap: float
    row_group: int

    def run(
        self,
        tokens: NDArray[np.int64],
        start: int,
        *,
        with_logits: bool,
        ledger: Ledger,
        on_exit: Callable[[ExitGuesses], None] | None = None,
        exits: Collection[int] | None = None,
    ) -> TargetOutput:
        """Run rows `tokens [S]` at positions `start ..`; the cache before `start` is kept, anything after replaced.

        `on_exit` hears the exits after the layers `exits`, every one where that is None; no other exit is run.
        """

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        """Like `run`, but only the cache is wanted: no exit, at most one row of logits."""

    def terminate(self) -> None:
        """Ask the pass that is running to end early with a `DeviceError`. May be called from any thread."""

    def close(self) -> None:
        """Release the device."""


class TargetModel(Protocol):
    """A loaded target, from which sessions are made."""

    def new_session(self) -> TargetSession:
        """A session with a cache of its own."""

    def describe(self) -> str:
        """One line: what runs where."""
