"""Who is in a slot of a joint pass, who is its guest, and what the slots' attention is told.

A session that brings few rows has them attended in its slot, together with all others'. One that brings more is a
guest. So is one that has so many more rows than others, or so much longer a text, that their slots would suffer.

Owns: that choice, and positions, masks and places of the slots' rows. Does not own: memory (`rooms`), bindings
(`batch`), the graph that reads all this (`packed_graph`).
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.packed_graph import (
    OWN_HEADS,
    ROW_POSITIONS,
    SLOT_HEADS,
    SLOT_MASK,
    SLOT_PLACES,
    SLOT_SIZES,
    Heads,
    guest_rows,
    of_table,
)
from mirrorsd.runtime.backends.onnxruntime.rooms import Room
from mirrorsd.runtime.backends.protocol import MOST_SEATED
from mirrorsd.runtime.ledger import TargetPass

NUM_GUESTS = 1
"""Of a pass. A place for one costs a node of attention in every layer, used or not: a tenth of a joint pass of SmolLM2.
"""
_GUEST_COST = 1.6
"""Times what a slot's attention takes for the same text: SmolLM2 behind 400 tokens, a layer, 108 us for 69. Where it is
1,000, no guest is chosen: `joint_passes.py BUNDLE --past 600:3,50 --with _GUEST_COST=1000`."""
_READING = 4.0
"""Rows whose attention takes as long as reading the cache does (`--with _READING=1`)."""
_FEWEST_ATTENDED = 2
"""Rows of attention: a single one has another routine."""


class Slots(NamedTuple):
    """The slots of a batch.

    Attributes:
        num_tables: how many nodes attend for them.
        at_each: how many there are at each table.
        heads: how they attend.
        fewest_tokens: a text in a slot has more.
        most_tokens: that it may have.
        spare_rows: that a guest's rows have behind them.
    """

    num_tables: int
    at_each: int
    heads: Heads
    fewest_tokens: int
    most_tokens: int
    spare_rows: int

    def num_attended(self, num_rows: int) -> int:
        """Rows of a table's attention where its slots have so many: with the heads of queries that share one."""
        found = num_rows * self.heads.num_shared
        return max(found, _FEWEST_ATTENDED)


class Seated(NamedTuple):
    """Who is where in a pass: passes by their slot, which are places of one room, and those that are guests."""

    room: Room
    slots: dict[int, TargetPass]
    guests: list[TargetPass]


Located = Sequence[tuple[Room, int]]
"""The place of each pass's session."""


def seated(passes: Sequence[TargetPass], places: Located, slots: Slots) -> Seated | None:
    """Who is in a slot, and who a guest; None if there are more guests than places for them."""
    room, guests, sitting = _by_size(passes, places, slots)
    if len(guests) > NUM_GUESTS:
        return None
    while len(guests) < NUM_GUESTS and len(sitting) > 1:
        found = too_much({number: (one.start, len(one.tokens)) for number, one in sitting.items()}, slots.at_each)
        if found is None:
            break
        guests.append(sitting.pop(found))
    return Seated(room, sitting, guests)


def have_places(passes: Sequence[TargetPass], places: Located, slots: Slots) -> bool:
    """Whether passes can be together."""
    return len(_by_size(passes, places, slots)[1]) <= NUM_GUESTS


def _by_size(
    passes: Sequence[TargetPass], places: Located, slots: Slots
) -> tuple[Room, list[TargetPass], dict[int, TargetPass]]:
    room: Room | None = None
    guests, sitting = list[TargetPass](), dict[int, TargetPass]()
    for one, (own, number) in zip(passes, places, strict=True):
        is_fitting = slots.fewest_tokens < one.start + len(one.tokens) <= slots.most_tokens
        if is_fitting and len(one.tokens) <= MOST_SEATED and own is (room or own):
            room = own
            sitting[number] = one
        else:
            guests.append(one)
    return room or places[0][0], guests, sitting


def too_much(texts: Mapping[int, tuple[int, int]], at_each: int) -> int | None:
    """Who is better off as a guest, if anybody: tokens before, and rows, by slot; so many slots at each table.

    Attention of a table takes as long as if all texts were as long as the longest, and had as many rows as any:

    >>> too_much({0: (900, 1), 1: (60, 1), 2: (50, 1), 5: (40, 1)}, 4)
    0
    >>> too_much({0: (900, 1), 1: (700, 1), 2: (50, 1)}, 4)
    >>> too_much({0: (90, 1), 1: (70, 8), 2: (90, 1)}, 4)
    1
    """
    tables: dict[int, dict[int, tuple[int, int]]] = {}
    for slot, text in texts.items():
        tables.setdefault(slot // at_each, {})[slot] = text
    best, found = 0.0, None
    for table in tables.values():
        whole = _cost(table.values())
        for slot, text in table.items():
            others = [other for number, other in table.items() if number != slot]
            gain = at_each * (whole - _cost(others)) - _GUEST_COST * _cost([text])
            if gain > best:
                best, found = gain, slot
    return found


def _cost(texts: Collection[tuple[int, int]]) -> float:
    """What attention takes for a slot of a table with these texts."""
    rows = max((rows for _, rows in texts), default=0)
    return max((start + rows for start, rows in texts), default=0) * (_READING + rows)


class Told(NamedTuple):
    """Where rows stand, where keys and values go, what each row sees: by name. And how long each table's texts are."""

    inputs: dict[str, NDArray[Any]]
    lengths: list[int]


class _Sitting(NamedTuple):
    """A table's rows, as many in each slot.

    Attributes:
        num_each: of each slot.
        num_attended: rows of its attention.
        places: of those that conversations have, among all slots' rows, `[n]`.
        rows: which rows of the pass they are, `[n]`.
    """

    num_each: int
    num_attended: int
    places: NDArray[np.int64]
    rows: NDArray[np.int64]


class Plan:
    """What stays the same in pass after pass, as long as who is in them does.

    Attributes:
        fixed: inputs of the stages, by name: which heads of rows are attended where, which are kept, where a row's own
            heads are.
    """

    def __init__(self, counts: tuple[tuple[int, int], ...], slots: Slots) -> None:
        """Lay out passes of so many rows each, one after another: `counts` are their slots, -1 for a guest, and rows.

        A slot without a row, or with fewer than others of its table, has rows more that see a single token.
        """
        self._slots = slots
        num_heads, shared = slots.heads
        ends = np.cumsum([count for _, count in counts])
        own_rows = [(slot, np.arange(end - count, end)) for (slot, count), end in zip(counts, ends, strict=True)]
        own = np.empty((int(ends[-1]), num_heads, shared), np.int64)
        width = num_heads * (shared + 2)
        asked, sizes, num_attended = list[NDArray[np.int64]](), list[int](), 0
        self._tables: list[_Sitting] = []
        for table in range(slots.num_tables):
            sitting = [(slot % slots.at_each, rows) for slot, rows in own_rows if slot // slots.at_each == table]
            count = max((len(rows) for _, rows in sitting), default=1)
            all_rows = np.zeros((count, 1, slots.at_each, 1), np.int64)
            for seat, rows in sitting:
                all_rows[: len(rows), 0, seat, 0] = rows
            heads = np.arange(num_heads) * shared + np.arange(shared)[:, None, None]
            of_table_ = all_rows * width + heads  # rows, shared, slots, heads
            found = np.arange(of_table_.size).reshape(of_table_.shape) + num_attended
            for seat, rows in sitting:
                own[rows] = found[: len(rows), :, seat].transpose(0, 2, 1)
            times = slots.num_attended(count) // (count * shared)  # a single one is asked for twice
            asked += [of_table_.reshape(-1)] * times
            sizes.append(times * of_table_.size)
            num_attended += sizes[-1]
            places = [np.arange(len(rows)) * slots.at_each + seat for seat, rows in sitting]
            self._tables.append(
                _Sitting(count, times * count * shared, _joined(places), _joined([rows for _, rows in sitting]))
            )
        guests = [rows for slot, rows in own_rows if slot < 0]
        for rows in guests:
            heads = np.arange(num_heads * shared).reshape(num_heads, shared)
            own[rows] = np.arange(len(rows))[:, None, None] * heads.size + heads + num_attended
            num_attended += (len(rows) + slots.spare_rows) * heads.size
        seats = [(slot, rows) for slot, rows in own_rows if slot >= 0]
        self._kept = _joined([rows for _, rows in seats])
        sides, heads = np.arange(2)[:, None], np.arange(num_heads)  # all keys come first in a room, then values
        number = _joined([np.full(len(rows), slot) for slot, rows in seats])[:, None, None]
        self._parts = (sides * (slots.num_tables * slots.at_each) + number) * num_heads + heads
        kept = self._kept[:, None, None] * width + num_heads * (shared + sides) + heads
        self.fixed = {
            SLOT_HEADS: np.concatenate([*asked, kept.reshape(-1)]),
            SLOT_SIZES: np.array([*sizes, kept.size]),
            OWN_HEADS: own.reshape(-1),
        }
        for guest in range(NUM_GUESTS):
            rows = np.zeros(1, np.int64)
            if guest < len(guests):
                rows = np.concatenate([guests[guest], guests[guest][-1:].repeat(slots.spare_rows)])
            self.fixed[guest_rows(guest)] = rows

    def told(self, positions: NDArray[np.int64], rows_of_place: int) -> Told:
        """What else the stages are told.

        Args:
            positions: of each row in its text, `[rows]`.
            rows_of_place: of the room.
        """
        num_heads, shared = self._slots.heads
        places = self._parts * rows_of_place + positions[self._kept][:, None, None]
        inputs: dict[str, NDArray[Any]] = {ROW_POSITIONS: positions[None], SLOT_PLACES: places.reshape(-1, 1)}
        lengths = list[int]()
        for table, one in enumerate(self._tables):
            seen = np.zeros(one.num_each * self._slots.at_each, np.int64)
            seen[one.places] = positions[one.rows]
            lengths.append(int(seen.max()) + 1 + one.num_attended)
            hidden = np.zeros((len(seen), lengths[-1]), np.float32)
            hidden[np.arange(lengths[-1]) > seen[:, None]] = -np.inf
            by_slot = hidden.reshape(one.num_each, self._slots.at_each, -1).transpose(1, 0, 2)
            times = one.num_attended // (one.num_each * shared)
            mask = np.empty((self._slots.at_each, num_heads, times, one.num_each, shared, lengths[-1]), np.float32)
            mask[...] = by_slot[:, None, None, :, None]
            inputs[of_table(SLOT_MASK, table)] = mask.reshape(1, -1, one.num_attended, lengths[-1])
        return Told(inputs, lengths)


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


@lru_cache(maxsize=64)
def plan_of(counts: tuple[tuple[int, int], ...], slots: Slots) -> Plan:
    """The plan of such passes: see there."""
    return Plan(counts, slots)
