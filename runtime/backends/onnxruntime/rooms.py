"""Caches of several sessions side by side, so that one node of a graph attends over all of them.

Owns: the memory, and which session has which place in it. Does not own: when a session moves in (`batch`).

A session has a place from its first joint pass until it is closed. It goes on decoding alone there: its place is a part
of the room's memory that has a cache's own shape. Pages that no text has reached take no memory.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from mirrorsd.devices.onnxruntime.packed_graph import of_room, of_table
from mirrorsd.devices.onnxruntime.stage import Place
from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import TargetEntry

Caches = Mapping[str, ort.OrtValue]
_KEPT = ((names.past_key, names.present_key), (names.past_value, names.present_value))


class Places(NamedTuple):
    """Of a room: tables of so many places, with so many rows behind the longest text."""

    num_tables: int
    at_each: int
    more_rows: int


class Room:
    """Places for so many sessions, at tables.

    Attributes:
        values: what a joint pass reads and writes, by name: all that a layer keeps, and each table's keys and values,
            which are parts of that.
        num_rows: of each place.
        owners: whose each place is, table by table.
    """

    def __init__(self, entry: TargetEntry, place: Place, places: Places) -> None:
        """Reserve memory for texts as long as the context, and some rows behind them."""
        shape = entry.shape
        self.num_rows = entry.capacity + places.more_rows
        self.owners: list[object | None] = [None] * (places.num_tables * places.at_each)
        self.values: dict[str, ort.OrtValue] = {}
        self._parts: list[dict[str, ort.OrtValue]] = [{} for _ in self.owners]
        own = (1, shape.num_kv_heads, self.num_rows, shape.head_dim)
        of_each = (1, places.at_each * shape.num_kv_heads, *own[2:])
        for layer in shape.attention_layers:
            whole = place.tensor((2 * len(self.owners) * own[1] * own[2], own[3]), shape.dtype)
            room = of_room(names.past_key(layer))
            self.values[room] = self.values[f"{room}.written"] = whole.value
            for (past, present), half in zip(_KEPT, np.split(whole.read(), 2), strict=True):
                for table, part in enumerate(np.split(half, places.num_tables)):
                    name = of_table(past(layer), table)
                    self.values[name] = ort.OrtValue.ortvalue_from_numpy(part.reshape(of_each))
                for parts, part in zip(self._parts, np.split(half, len(self.owners)), strict=True):
                    parts[past(layer)] = parts[present(layer)] = ort.OrtValue.ortvalue_from_numpy(part.reshape(own))

    def caches_of(self, number: int) -> Caches:
        """What a place's session binds: past and present ones, by name."""
        return self._parts[number]


class Rooms:
    """As many rooms as sessions need."""

    def __init__(self, entry: TargetEntry, place: Place, places: Places) -> None:
        self._entry, self._place, self._of_each = entry, place, places
        self._rooms: list[Room] = []
        self._places: dict[object, tuple[Room, int]] = {}

    def place_of(self, session: object) -> tuple[Room, int]:
        """A session's place; one that has none is given the first that is free."""
        found = self._places.get(session)
        if found is None:
            room = next((room for room in self._rooms if None in room.owners), None)
            if room is None:
                room = Room(self._entry, self._place, self._of_each)
                self._rooms.append(room)
            found = self._places[session] = room, room.owners.index(None)
            room.owners[found[1]] = session
        return found

    def leave(self, session: object) -> bool:
        """Take a place back; whether its room is empty now, and gone."""
        if session not in self._places:
            return False
        room, number = self._places.pop(session)
        room.owners[number] = None
        is_empty = not any(owner is not None for owner in room.owners)
        if is_empty:
            self._rooms.remove(room)
        return is_empty


def new_caches(entry: TargetEntry, place: Place, num_rows: int) -> Caches:
    """Share-buffer caches: `past_*` and `present_*` of a layer are one value of so many rows."""
    shape = (1, entry.shape.num_kv_heads, num_rows, entry.shape.head_dim)
    found: dict[str, ort.OrtValue] = {}
    for layer in entry.shape.attention_layers:
        for past, present in _KEPT:
            found[past(layer)] = found[present(layer)] = place.tensor(shape, entry.shape.dtype).value
    return found


def moved(caches: Caches, into: Caches, rows: range) -> None:
    """Copy rows of a text from place to place; past and present ones are the same memory, which is copied once."""
    places = {value.data_ptr(): (value, into[name]) for name, value in caches.items()}
    for source, copied in places.values():
        if copied.data_ptr() != source.data_ptr():
            copied.numpy()[:, :, rows.start : rows.stop] = source.numpy()[:, :, rows.start : rows.stop]
