"""Who is in a slot of a joint pass, who is its guest, and what the slots' attention is told.

A session that brings few rows has them attended in its slot, together with all others'. One that brings more is a
guest. So is one that has so many more rows than others, or so much longer a text, that their slots would suffer.

Owns: that choice, and positions, masks and places of the slots' rows. Does not own: memory (`rooms`), bindings
(`batch`), the graph that reads all this (`packed_graph`).
"""

from collections.abc import Collection, Mapping, Sequence
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
    of_table,
)
from mirrorsd.runtime.backends.onnxruntime.rooms import Room
from mirrorsd.runtime.backends.protocol import TargetPass

NUM_GUESTS = 1
"""Of a pass. A place for one costs a node of attention in every layer, used or not: a tenth of a joint pass of SmolLM2.
"""
_GUEST_COST = 1.6
"""Times what a slot's attention takes for the same text: SmolLM2 behind 400 tokens, a layer, 108 us for 69."""
_READING = 4.0
"""Rows whose attention takes as long as reading the cache does."""
MOST_SEATED = 8
"""Rows of a slot: a window and the token before it. More are a part of a prompt."""
_FEWEST_ATTENDED = 2
"""Rows of attention: a single one has another routine."""


class Slots(NamedTuple):
    """The slots of a batch.

    Attributes:
        num_tables: how many nodes attend for them.
        at_each: how many there are at each table.
        heads: how they attend.
        most_tokens: that a text in a slot may have.
        spare_rows: that a guest's rows have behind them.
    """

    num_tables: int
    at_each: int
    heads: Heads
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
        count = len(one.tokens)
        if count <= MOST_SEATED and one.start + count <= slots.most_tokens and own is (room or own):
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
    """What the stages are told of the slots: inputs by name, and how long the texts of each table are taken to be."""

    inputs: dict[str, NDArray[Any]]
    lengths: list[int]


class _Telling:
    """Puts together what the stages are told, table by table."""

    def __init__(self, taken: Seated, rows_of: Mapping[int, list[int]], slots: Slots) -> None:
        self._taken, self._rows_of, self._slots = taken, rows_of, slots
        self._num_heads, self._shared = slots.heads
        num_rows = sum(map(len, rows_of.values()))
        self._own = np.empty((num_rows, self._num_heads, self._shared), np.int64)
        self._positions = np.zeros((1, num_rows), np.int64)
        self._asked, self._sizes, self._num_attended = list[NDArray[np.int64]](), list[int](), 0
        self._masks: dict[str, NDArray[np.float32]] = {}
        self._lengths: list[int] = []

    def told(self) -> Told:
        """All of it."""
        for table in range(self._slots.num_tables):
            self._tell_table(table)
        for one in self._taken.guests:
            rows = self._rows_of[id(one)]
            heads = np.arange(self._num_heads * self._shared).reshape(self._num_heads, self._shared)
            self._own[rows] = np.arange(len(rows))[:, None, None] * heads.size + heads + self._num_attended
            self._num_attended += (len(rows) + self._slots.spare_rows) * heads.size
            self._positions[0, rows] = range(one.start, one.start + len(rows))
        kept, places = self._kept()
        inputs: dict[str, NDArray[Any]] = {
            SLOT_HEADS: np.concatenate([*self._asked, kept]),
            SLOT_SIZES: np.array([*self._sizes, len(kept)]),
            ROW_POSITIONS: self._positions,
            SLOT_PLACES: places[:, None],
            OWN_HEADS: self._own.reshape(-1),
            **self._masks,
        }
        return Told(inputs, self._lengths)

    def _tell_table(self, table: int) -> None:
        """A slot without a row, or with fewer than others, has rows more that see a single token."""
        num_heads, shared, slots = self._num_heads, self._shared, self._slots
        first = table * slots.at_each
        sitting = {
            seat - first: one for seat, one in self._taken.slots.items() if first <= seat < first + slots.at_each
        }
        own = {seat: self._rows_of[id(one)] for seat, one in sitting.items()}
        count = max(map(len, own.values()), default=1)
        rows, positions = np.zeros((2, count, slots.at_each, 1), np.int64)
        heads = np.arange(num_heads) * shared + np.arange(shared)[:, None, None]
        for seat, found in own.items():
            stop = sitting[seat].start + len(found)
            self._positions[0, found] = positions[: len(found), seat, 0] = range(sitting[seat].start, stop)
            rows[: len(found), seat, 0] = found
        asked = rows[:, None] * (num_heads * (shared + 2)) + heads  # rows, shared, slots, heads
        places = np.arange(asked.size).reshape(asked.shape) + self._num_attended
        for seat, found in own.items():
            self._own[found] = places[: len(found), :, seat].transpose(0, 2, 1)
        num_attended = slots.num_attended(count)
        times = num_attended // (count * shared)  # a single one is asked for twice
        self._asked += [asked.reshape(-1)] * times
        self._sizes.append(times * asked.size)
        self._num_attended += times * asked.size
        length = int(positions.max()) + 1 + num_attended
        hidden = np.where(np.arange(length) > positions, np.float32(-np.inf), np.float32(0))  # rows, slots, length
        mask = np.empty((slots.at_each, num_heads, times, count, shared, length), np.float32)
        mask[...] = hidden.transpose(1, 0, 2)[:, None, None, :, None]
        self._masks[of_table(SLOT_MASK, table)] = mask.reshape(1, slots.at_each * num_heads, num_attended, length)
        self._lengths.append(length)

    def _kept(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which heads are keys and values of slots' rows, and where in the room they go: all its keys come first."""
        num_heads, slots = self._num_heads, self._slots
        seats = list(self._taken.slots.items())
        counts = [len(self._rows_of[id(one)]) for _, one in seats]
        rows = np.array([row for _, one in seats for row in self._rows_of[id(one)]], np.int64)[:, None, None]
        sides, heads = np.arange(2)[:, None], np.arange(num_heads)
        kept = rows * (num_heads * (self._shared + 2)) + num_heads * (self._shared + sides) + heads
        number = np.repeat([seat for seat, _ in seats], counts).astype(np.int64)[:, None, None]
        part = (sides * (slots.num_tables * slots.at_each) + number) * num_heads + heads
        places = part * self._taken.room.num_rows + self._positions[0, rows]
        return kept.reshape(-1), places.reshape(-1)


def told(taken: Seated, rows_of: Mapping[int, list[int]], slots: Slots) -> Told:
    """Which heads of rows are attended where, what is kept where, what each row sees, and where its own heads are.

    Args:
        taken: who is in the pass.
        rows_of: the rows of each pass (by `id`) among all.
        slots: of the batch.
    """
    return _Telling(taken, rows_of, slots).told()
