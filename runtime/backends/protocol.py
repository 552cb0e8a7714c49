"""The devices as the runtime sees them: sessions of draft and target, and the models that they are made from.

`TargetSession` is the seam: ONNX Runtime implements it (`onnxruntime/target`), tests do with a handler (`fake`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.devices.slot_draft import NoiseSource
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Head
from mirrorsd.runtime.ledger import Ledger, PassRunner, TargetOutput, TargetPass

Result = TypeVar("Result")
MOST_SEATED = 8
"""Rows that each conversation may bring to a pass of several: a window and the token before it. One may have more."""
Progress = Callable[[str, float], None]
"""Takes what is being done, and what share of it is done, 0..1."""


class DraftSession(Protocol):
    """One draft on one device, with one cache."""

    shape: DraftShape
    round_sizes: tuple[int, ...]
    """Row counts that are worth filling: a round costs as much as the next larger of these."""
    max_tips: int
    prefill_rows: int
    capacity: int

    @property
    def shares_rounds(self) -> bool:
        """Whether a round has the rows of all conversations that draft at once, however many those are."""
        return False

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

    @property
    def copies_rows(self) -> bool:
        """Whether slots of another session's cache can be copied into its own."""
        return False

    def copy_rows(self, source: "DraftSession", rows: range) -> None:
        """Copy these slots of the cache of a session of the same model."""
        raise DeviceError("This device map's draft keeps its caches apart.")

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


class TargetSession(PassRunner, Protocol):
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

    @property
    def copies_rows(self) -> bool:
        """Whether rows of another session's cache can be copied into its own, faster than they are computed."""
        return False

    def copy_rows(self, source: "TargetSession", rows: range) -> None:
        """Copy these rows of the cache of a session of the same model, on the target's thread."""
        raise DeviceError("This device map's target keeps its caches apart.")

    def terminate(self) -> None:
        """Ask the pass that is running to end early with a `DeviceError`. May be called from any thread."""

    def close(self) -> None:
        """Release the device."""


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


class TargetModel(Protocol):
    """A loaded target, from which sessions are made."""

    def new_session(self) -> TargetSession:
        """A session with a cache of its own."""

    def open_batch(self, num_slots: int) -> TargetBatch | None:
        """What runs several sessions together; None where this target runs one after another. Takes seconds."""

    def describe(self) -> str:
        """One line: what runs where."""
