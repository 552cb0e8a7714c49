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

from mirrorsd.devices.onnxruntime.packed_graph import (
    SLOT_MASK,
    SLOT_PLACES,
    SLOT_POSITIONS,
    SLOT_ROWS,
    of_table,
)
from mirrorsd.runtime.backends.onnxruntime.rooms import Room
from mirrorsd.runtime.backends.protocol import TargetPass

NUM_GUESTS = 1
"""Of a pass. A place for one costs a node of attention in every layer, used or not: a tenth of a joint pass of SmolLM2.
"""
_GUEST_COST = 1.6
"""Times what a slot's attention takes for the same text: SmolLM2 behind 400 tokens, a layer, 108 us for 69."""


class Slots(NamedTuple):
    """The slots of a batch.

    Attributes:
        num_tables: how many nodes attend for them.
        at_each: how many there are at each table.
        group: rows that each takes.
        num_heads: of keys and values.
        num_rows: rows of attention in each: queries that share a head.
        most_tokens: that a text in a slot may have.
    """

    num_tables: int
    at_each: int
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
    sitting = {number: one for (_, number), one, may in zip(places, passes, may_sit, strict=True) if may}
    while len(guests) < NUM_GUESTS and sitting:
        found = too_long({number: one.start for number, one in sitting.items()}, slots.at_each)
        if found is None:
            break
        guests.append(sitting.pop(found))
    return Seated(room, sitting, guests)


def too_long(lengths: Mapping[int, int], at_each: int) -> int | None:
    """Whose text is better off as a guest, if anybody's: lengths by slot, so many slots at each table.

    Attention of a table takes as long as if all its texts were as long as the longest:

    >>> too_long({0: 900, 1: 60, 2: 50, 5: 40}, 4)
    0
    >>> too_long({0: 900, 1: 700, 2: 50}, 4)
    """
    tables: dict[int, list[tuple[int, int]]] = {}
    for slot, length in lengths.items():
        tables.setdefault(slot // at_each, []).append((length, slot))
    best, found = 0.0, None
    for table in tables.values():
        (longest, slot), *others = sorted(table, reverse=True)
        gain = at_each * (longest - (others[0][0] if others else 0)) - _GUEST_COST * longest
        if gain > best:
            best, found = gain, slot
    return found


def table_inputs(
    taken: Seated, table: int, rows_of: Mapping[int, list[int]], places: NDArray[np.int64], slots: Slots
) -> tuple[dict[str, NDArray[Any]], int]:
    """What a table is told, by name: rows, positions, where keys and values go, what each row sees. And the length.

    A slot without a row has one that sees a single token, and writes behind all texts.

    Args:
        taken: who is in the pass.
        table: which one.
        rows_of: the rows of each pass (by `id`) among all.
        places: `[rows]`, where each row is attended; those of the table are written here.
        slots: of the batch.
    """
    shape = slots.at_each, slots.group
    rows, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    written = np.full(shape, taken.room.num_rows - 1)
    for seat in range(slots.at_each):
        number = table * slots.at_each + seat
        one = taken.slots.get(number)
        if one is not None:
            own = rows_of[id(one)]
            rows[seat] = own
            positions[seat] = written[seat] = range(one.start, one.start + slots.group)
            places[own] = range(number * slots.group, (number + 1) * slots.group)
    length = int(positions.max()) + 1 + slots.num_rows
    hidden = np.arange(length) > positions[:, :, None]
    mask = np.zeros((slots.at_each, slots.num_heads, slots.group, slots.num_rows // slots.group, length), np.float32)
    mask[...] = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :, None]
    targets = np.zeros((*shape, slots.num_heads, 3), np.int64)
    targets[..., 1] = np.arange(slots.at_each)[:, None, None] * slots.num_heads + np.arange(slots.num_heads)
    targets[..., 2] = written[:, :, None]
    found: dict[str, NDArray[Any]] = {
        SLOT_ROWS: rows.reshape(-1),
        SLOT_POSITIONS: positions.reshape(1, -1),
        SLOT_PLACES: targets.reshape(-1, 3),
        SLOT_MASK: mask.reshape(1, slots.at_each * slots.num_heads, slots.num_rows, length),
    }
    return {of_table(name, table): array for name, array in found.items()}, length
