"""Who is in a slot of a joint pass, who is its guest, and what the slots' attention is told.

A session that brings one row (one group of rows) has it attended in its slot, together with all others'. One that
brings more is a guest. So is one whose text is so much longer than the others' that their slots would suffer from it.

Owns: that choice, and positions, masks and places of the slots' rows. Does not own: memory (`rooms`), bindings
(`batch`), the graph that reads all this (`packed_graph`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.onnxruntime.packed_graph import SLOT_MASK, SLOT_PLACES, SLOT_POSITIONS, SLOT_ROWS
from mirrorsd.runtime.backends.onnxruntime.rooms import Room
from mirrorsd.runtime.backends.protocol import TargetPass

NUM_GUESTS = 1
"""Of a pass. A place for one costs a node of attention in every layer, used or not: a tenth of a joint pass of SmolLM2.
"""
_GUEST_COST = 4
"""Times what a slot's attention takes for the same text: a guest's packs keys and values once for every head."""


class Slots(NamedTuple):
    """The slots of a batch.

    Attributes:
        count: how many there are.
        group: rows that each takes.
        num_heads: of keys and values.
        num_rows: rows of attention in each: queries that share a head.
        most_tokens: that a text in a slot may have.
    """

    count: int
    group: int
    num_heads: int
    num_rows: int
    most_tokens: int


class Seated(NamedTuple):
    """Who is where in a pass: passes by their slot, which are places of one room, and those that are guests."""

    room: Room
    slots: dict[int, TargetPass]
    guests: list[TargetPass]


def seated(passes: Sequence[TargetPass], places: Sequence[tuple[Room, int]], slots: Slots) -> Seated | None:
    """Who is in a slot, and who a guest; None if there are more guests than places for them."""
    is_single = [len(one.tokens) <= slots.group and one.start + slots.group <= slots.most_tokens for one in passes]
    room = next((room for (room, _), single in zip(places, is_single, strict=True) if single), places[0][0])
    may_sit = [single and place[0] is room for single, place in zip(is_single, places, strict=True)]
    guests = [one for one, may in zip(passes, may_sit, strict=True) if not may]
    if len(guests) > NUM_GUESTS:
        return None
    sitting = [(number, one) for (_, number), one, may in zip(places, passes, may_sit, strict=True) if may]
    longest = sorted(sitting, key=lambda found: -found[1].start)
    count = num_too_long([one.start for _, one in longest], slots.count, NUM_GUESTS - len(guests))
    return Seated(room, dict(longest[count:]), guests + [one for _, one in longest[:count]])


def num_too_long(lengths: Sequence[int], num_slots: int, most: int) -> int:
    """How many of some texts, the longest first, are better off as guests, at most `most`.

    Attention of all slots takes as long as if every text were as long as the longest:

    >>> num_too_long([900, 60, 50, 40], 8, 1), num_too_long([60, 60, 50, 40], 8, 1)
    (1, 0)
    """
    behind = [*lengths, 0]
    costs = [num_slots * behind[count] + _GUEST_COST * sum(lengths[:count]) for count in range(len(behind))]
    return costs.index(min(costs[: most + 1]))


def slot_inputs(
    taken: Seated, rows_of: Mapping[int, list[int]], places: NDArray[np.int64], slots: Slots
) -> tuple[dict[str, NDArray[Any]], int]:
    """What the slots are told, by name: rows, positions, where keys and values go, what each row sees. And the length.

    A slot without a row has one that sees a single token, and writes behind all texts.

    Args:
        taken: who is in the pass.
        rows_of: the rows of each pass (by `id`) among all.
        places: `[rows]`, where each row is attended; those in slots are written here.
        slots: of the batch.
    """
    shape = slots.count, slots.group
    rows, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    written = np.full(shape, taken.room.num_rows - 1)
    for slot, one in taken.slots.items():
        own = rows_of[id(one)]
        rows[slot] = own
        positions[slot] = written[slot] = range(one.start, one.start + slots.group)
        places[own] = range(slot * slots.group, (slot + 1) * slots.group)
    length = int(positions.max()) + 1 + slots.num_rows
    hidden = np.arange(length) > positions[:, :, None]
    mask = np.zeros((*shape[:1], slots.num_heads, slots.group, slots.num_rows // slots.group, length), np.float32)
    mask[...] = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :, None]
    targets = np.zeros((*shape, slots.num_heads, 3), np.int64)
    targets[..., 1] = np.arange(slots.count)[:, None, None] * slots.num_heads + np.arange(slots.num_heads)
    targets[..., 2] = written[:, :, None]
    found = {
        SLOT_ROWS: rows.reshape(-1),
        SLOT_POSITIONS: positions.reshape(1, -1),
        SLOT_PLACES: targets.reshape(-1, 3),
        SLOT_MASK: mask.reshape(1, slots.count * slots.num_heads, slots.num_rows, length),
    }
    return found, length
