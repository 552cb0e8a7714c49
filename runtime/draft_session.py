"""The draft as the runtime sees it: a pass over rows, and a cache that the host owns.

`DraftSession` is the seam: OpenVINO implements it (`openvino_draft`), tests implement it with a handler (`fake`).
"""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.sampling.chooser import NoiseSource


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


def check_guesses(guesses: TipGuesses, num_tips: int, shape: DraftShape) -> TipGuesses:
    """Refuse what no working draft returns, before it can reach the target.

    Raises:
        DeviceError: wrong shape, an id outside the vocabulary, or a log-probability that is not a number.
    """
    expected = (num_tips, 1 + shape.num_streams)
    if guesses.ids.shape[:2] != expected or guesses.logprobs.shape != guesses.ids.shape:
        raise DeviceError(f"The draft returned guesses of shape {guesses.ids.shape}, expected {(*expected, 'm')}.")
    # Without a sign, ids below 0 are the largest: one look finds both ends. A minimum with a NaN is one.
    if guesses.ids.size and guesses.ids.view(np.uint64).max() >= shape.vocab_size:
        raise DeviceError(f"The draft returned token ids outside 0 .. {shape.vocab_size - 1}.")
    if guesses.ids.size and isnan(guesses.logprobs[..., 0].min()):
        raise DeviceError("The draft returned log-probabilities that are not numbers.")
    return guesses
