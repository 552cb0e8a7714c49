"""What a draft is asked and says, its cache of slots, and what its sessions run on.

Owns: the shapes of that. Does not own: sessions and the memory of their passes (`slot_draft`), joint passes
(`runtime/backends/draft_room`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mirrorsd.devices.draft_passes import Shape
from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry


class RowBlock(NamedTuple):
    """Consecutive rows of one pass that form a causal chain.

    A row of the block sees cache slots `0 .. chain_visible - 1`, the cache slots in `extra_slots`, the first
    `lead_rows` rows of the pass (`lead_rows` is 0 for the block that starts the pass), and its block up to itself.
    Where several texts share a pass, slots count from `first_slot` of the cache, and rows from `first_row` of the pass.
    """

    tokens: Sequence[int]
    first_position: int
    chain_visible: int
    extra_slots: Sequence[int] = ()
    lead_rows: int = 0
    first_slot: int = 0
    first_row: int = 0


class TipGuesses(NamedTuple):
    """What a pass predicts at its tip rows: `ids` and `logprobs` `[R, 1 + s, m]`, best first (by both, if with noise).

    `[r, 0]` is the token after tip `r`, `[r, j]` the token `j` further on.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


class DraftPass(NamedTuple):
    """What `DraftSession.run` is asked for, and whose session it is."""

    session: Any
    blocks: Sequence[RowBlock]
    tip_rows: Sequence[int]


class SlotCache:
    """Key and value caches of all layers, `[1, kvh, C, hd]` each, key and value in turn.

    Attributes:
        capacity: slots of each.
        names: the ports that they are bound to.
        arrays: their numbers.
    """

    def __init__(self, entry: DraftEntry, capacity: int, kind: DTypeLike) -> None:
        """Make an empty cache in ordinary memory."""
        shape = (1, entry.shape.num_kv_heads, capacity, entry.shape.head_dim)
        layers = range(entry.shape.num_layers)
        self.capacity = capacity
        self.names = [name for layer in layers for name in (names.past_key(layer), names.past_value(layer))]
        self.arrays: list[NDArray[np.floating]] = [np.zeros(shape, dtype=kind) for _ in self.names]

    def take(self, other: "SlotCache") -> None:
        """Copy the slots of a larger or smaller cache, as far as both have them."""
        size = min(self.capacity, other.capacity)
        for source, destination in zip(other.arrays, self.arrays, strict=True):
            destination[:, :, :size] = source[:, :, :size]


class CachePart(SlotCache):
    """One text's slots of a cache that several have; its arrays are views.

    Attributes:
        whole: that cache.
        first: its first slot there.
        requests: passes of the whole, by their shape.
    """

    def __init__(self, whole: SlotCache, first: int, capacity: int, requests: dict[Any, Any]) -> None:
        """Take `capacity` slots from `first` on."""
        self.whole, self.first, self.requests = whole, first, requests
        self.capacity, self.names = capacity, whole.names
        self.arrays = [array[:, :, first : first + capacity] for array in whole.arrays]


class DraftRounds(Protocol):
    """Makes passes of several sessions one.

    Attributes:
        num_working: jobs beside one another that have not asked for their next pass yet; 0 where there are none.
        takes_any: whether passes may have any number of rows, so that nearly all can be one.
    """

    num_working: int
    takes_any: bool

    def run(self, one: DraftPass) -> TipGuesses:
        """Run a pass: alone, or, where the calling job is one of several, together with theirs."""


class DraftShapes(Protocol):
    """What a draft's sessions run on, shared by all of them.

    Attributes:
        buckets: the passes' rows and tips, smallest first.
    """

    buckets: list[DraftBucket]

    def is_warm(self, rows: int, tips: int, capacity: int) -> bool:
        """Whether this shape has been run."""

    def warm_up(self, rows: int, tips: int, capacity: int) -> None:
        """Have this shape run once, so that its first real round pays nothing."""

    def fill_cache(self) -> None:
        """Make ready on disk what later requests would wait for."""

    def joint_bucket(self, rows: int, tips: int, capacity: int) -> DraftBucket | None:
        """What a pass of several sessions is padded to; None where that would have to be compiled first."""

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty key/value cache."""

    def new_request(self, shape: Shape, cache: Any) -> Any:
        """A request for passes of one shape, bound to a cache of that capacity that `new_cache` has made."""


class SlotDraftModel(Protocol):
    """A draft that is loaded."""

    @property
    def entry(self) -> DraftEntry:
        """The draft in the manifest."""

    @property
    def shapes(self) -> DraftShapes:
        """What its sessions run on."""

    @property
    def rounds(self) -> DraftRounds:
        """Makes passes of several sessions one."""
