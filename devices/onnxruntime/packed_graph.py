"""One graph for rows of several conversations: a stage of a bundle, rewritten in memory when there are several.

All rows go through every product together. Attention is computed by the operator of the stage, in two ways:

* A *slot* is for a conversation that brings one row (one group of rows, where rows are computed in groups). One node
  attends for all slots of a *table*, and takes as long as for its longest text. To it, each head of keys and values of
  each slot is a head of its own, and the heads of queries that share it are the rows. Texts differ in length, which a
  mask says: what stands behind a text is added as zeros.
* A *guest* brings as many rows as it has, as a window or a part of a prompt. Each has a node of its own.

Either way a row has the bits that it has alone. Weights stay where they are, in the bundle's file.

Owns: the rewriting, and what its inputs are called. Does not own: which conversation has which place (`batch`).

Around every attention node a stage has `rows -> Pad -> attention -> Slice`, where the padding is the spare row that
keeps a single row from another routine (`TargetEntry.spare_rows`). A guest's rows are gathered with a spare one; slots
need none where queries share a head, and have each row twice where not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mirrorsd.devices.onnxruntime.onnx_bytes import (
    Field,
    element_type,
    fields,
    joined,
    node,
    port,
    sizes_of,
    tensor,
)
from mirrorsd.graphs import names

SLOT_ROWS = "slot_rows"
"""`[slots x group]`, as all of this for each table: which row of the pass each slot has; any, where it has none."""
SLOT_POSITIONS = "slot_positions"
"""`[1, slots x group]`: where in its text that row stands."""
SLOT_PLACES = "slot_places"
"""`[slots x group x heads, 3]`: where in the slots' caches its keys and values go."""
SLOT_MASK = "slot_mask"
"""`[1, slots x heads, rows, length]`: 0 where a row may look, `-inf` behind its text."""
OWN_ROWS = "own_rows"
"""`[rows]`: where among those of all slots, then of all guests, the pass's own ones are."""
_GRAPH, _NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 7, 1, 5, 11, 12, 13
_OF_NODE = {"input": 1, "output": 2, "name": 3, "operator": 4}
_ATTRIBUTE, _INTEGER, _DOMAIN = 5, 3, "com.microsoft"
_ATTENTION = "GroupQueryAttention"
_ROWS, _CACHES, _LENGTHS, _TABLES = slice(0, 3), slice(3, 5), slice(5, 7), slice(7, None)
"""Inputs of attention: queries, keys and values; past ones; two lengths; tables of angles, and rarer ones."""
_FEWEST_ROWS = 2
"""Of attention: a single one has another routine."""
_WIDEST_HEAD = 128
"""Of which ONNX Runtime's product adds all numbers up in one go, however long the text is."""
_CHANGED = {"num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size"}


class NotPackableError(ValueError):
    """A stage in which rows of several conversations cannot be told apart."""


class Sizes(NamedTuple):
    """How many conversations a graph takes: tables of so many slots, each with a group of rows, and so many guests."""

    num_tables: int
    num_slots: int
    num_guests: int
    group: int
    spare_rows: int


class Packed(NamedTuple):
    """A rewritten stage.

    Attributes:
        model: its bytes.
        num_heads: of keys and values, in each slot.
        num_rows: that slots' attention has.
        window: most tokens that a slot's text may have, as its attention looks no further back; 0 for any number.
    """

    model: bytes
    num_heads: int
    num_rows: int
    window: int


def of_table(name: str, table: int) -> str:
    """What an input or output of one conversation, or of its slot, is called for all slots of a table.

    >>> of_table("past_key.3", 1)
    'past_key.3.table1'
    """
    return f"{name}.table{table}"


def of_guest(name: str, guest: int) -> str:
    """What it is called for a guest.

    >>> of_guest("past_key.3", 1)
    'past_key.3.guest1'
    """
    return f"{name}.guest{guest}"


def guest_rows(guest: int) -> str:
    """`[rows and spare ones]`: which rows of the pass a guest has.

    >>> guest_rows(0)
    'guest0_rows'
    """
    return f"guest{guest}_rows"


class _Node:
    """A node: its fields, and what can be read off them."""

    def __init__(self, message: bytes) -> None:
        self.parts = fields(message)
        self.inputs, self.outputs = self._texts("input"), self._texts("output")
        self.name, self.operator = "".join(self._texts("name")), "".join(self._texts("operator"))

    def _texts(self, kind: str) -> list[str]:
        return [part.text for part in self.parts if part.number == _OF_NODE[kind]]

    @property
    def attributes(self) -> dict[str, Field]:
        """By name, which stands first in each."""
        found = [part for part in self.parts if part.number == _ATTRIBUTE]
        return {part.data[2 : 2 + part.data[1]].decode(): part for part in found}

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is a whole number."""
        if name not in self.attributes:
            return default
        values = [part.content for part in fields(self.attributes[name].data) if part.number == _INTEGER]
        return next((value for value in values if isinstance(value, int)), default)

    def between(self, inputs: Sequence[str], outputs: Sequence[str], name: str) -> bytes:
        """The same operator between other values."""
        own = [Field(1, value.encode()) for value in inputs] + [Field(2, value.encode()) for value in outputs]
        rest = [part for part in self.parts if part.number not in (1, 2, 3)]
        return joined([*own, Field(3, name.encode()), *rest])


class _Attention(NamedTuple):
    """A node of attention, and what stands around it: rows without spare ones, and what it makes of them."""

    node: _Node
    rows: Sequence[str]
    attended: str


def packed(model: bytes, sizes: Sizes) -> Packed:
    """A stage for several conversations at once.

    Raises:
        NotPackableError: something but attention depends on where in its text a row stands.
        ValueError: these are not the bytes of a graph.
    """
    whole = fields(model)
    (graph,) = (part for part in whole if part.number == _GRAPH)
    parts = fields(graph.data)
    nodes = [_Node(one.data) for one in parts if one.number == _NODE]
    constants = dict(found for one in parts if one.number == _INITIALIZER for found in _named_sizes(one.data))
    check_packable(nodes, set(constants))
    attentions = {id(one.node): one for one in _attentions(nodes, sizes.spare_rows)}
    left_out = _around(nodes, attentions.values(), sizes.spare_rows)
    ports = {_name(one): one for one in parts if one.number in (_INPUT, _OUTPUT)}
    writer = _Writer(sizes, ports, constants)
    written: list[bytes] = []
    for one in nodes:
        if id(one) in attentions:
            written += writer.attention(attentions[id(one)])
        elif id(one) not in left_out:
            written.append(joined(one.parts))
    rest = [one for one in parts if one.number not in (_NODE, _INPUT, _OUTPUT, _VALUE_INFO)]
    rest += [Field(_INITIALIZER, constant) for constant in writer.constants.values()]
    rewritten = [*(Field(_NODE, one) for one in written), *rest, *writer.ports()]
    found = joined([Field(_GRAPH, joined(rewritten)) if part is graph else part for part in whole])
    return Packed(found, writer.num_heads, writer.num_rows, writer.window)


def check_packable(nodes: Sequence[_Node], constants: set[str]) -> None:
    """Refuse a stage in which more than attention asks for lengths, or attention for more than tables of angles.

    Raises:
        NotPackableError: says which.
    """
    if not any(one.operator == _ATTENTION for one in nodes):
        raise NotPackableError("it has no GroupQueryAttention")
    for one in nodes:
        if one.operator == _ATTENTION:
            tables = [name for name in one.inputs[_TABLES] if name]
            wrong = [name for name in tables if name not in constants] + tables[2:]
        else:
            wrong = [name for name in one.inputs if name in (names.SEQLENS_K, names.TOTAL_LENGTH)]
        if wrong:
            raise NotPackableError(f"{one.operator} {one.name} reads {wrong[0]}")


def _attentions(nodes: Sequence[_Node], spare_rows: int) -> Iterable[_Attention]:
    producers = {name: one for one in nodes for name in one.outputs if name}
    readers = Counter(name for one in nodes for name in one.inputs)
    for one in nodes:
        if one.operator != _ATTENTION:
            continue
        rows, attended = one.inputs[_ROWS], one.outputs[0]
        if spare_rows:
            pads = [producers[name] for name in rows if name in producers]
            cuts = [reader for reader in nodes if attended in reader.inputs]
            if [found.operator for found in (*cuts, *pads)] != ["Slice", *("Pad" for name in rows if name)]:
                raise NotPackableError(f"{one.name} has no spare rows of its own")
            if any(readers[pad.outputs[0]] != 1 for pad in pads):
                raise NotPackableError(f"the spare rows of {one.name} are read elsewhere")
            rows, attended = [producers[name].inputs[0] if name else "" for name in rows], cuts[0].outputs[0]
        yield _Attention(one, rows, attended)


def _around(nodes: Sequence[_Node], attentions: Iterable[_Attention], spare_rows: int) -> set[int]:
    """The nodes that add spare rows and take them away."""
    if not spare_rows:
        return set()
    padded = {name for one in attentions for name in one.node.inputs[_ROWS] if name}
    cut = {one.attended for one in attentions}
    return {id(one) for one in nodes if padded.intersection(one.outputs) or cut.intersection(one.outputs)}


class _Writer:
    """Writes what stands in the place of attention, and notes the ports and constants that this takes."""

    def __init__(self, sizes: Sizes, ports: Mapping[str, Field], constants: Mapping[str, Sequence[int]]) -> None:
        self.sizes, self.constants = sizes, dict[str, bytes]()
        self.num_heads = self.num_rows = self.window = 0
        self._ports, self._known = ports, constants
        self._written: list[str] = []

    def attention(self, one: _Attention) -> Iterable[bytes]:
        """Attention of all slots and of every guest, put together in the pass's order."""
        base, sizes = one.node.outputs[0], self.sizes
        found = [of_table(base, table) for table in range(sizes.num_tables)]
        found += [of_guest(base, guest) for guest in range(sizes.num_guests)]
        for table in range(sizes.num_tables):
            yield from self._of_table(one, table)
        for guest in range(sizes.num_guests):
            yield from self._of_guest(one, guest)
        yield node("Concat", found, [f"{base}.all"], axis=1)
        yield node("Gather", [f"{base}.all", OWN_ROWS], [one.attended], axis=1)

    def _of_guest(self, one: _Attention, guest: int) -> Iterable[bytes]:
        """The very node of the stage, over the guest's cache."""
        base = one.node.outputs[0]
        rows = [of_guest(f"{base}.rows{number}", guest) if name else "" for number, name in enumerate(one.rows)]
        for name, gathered in zip(one.rows, rows, strict=True):
            if name:
                yield node("Gather", [name, guest_rows(guest)], [gathered], axis=1)
        own = [of_guest(name, guest) for name in (*one.node.inputs[_CACHES], *one.node.inputs[_LENGTHS])]
        outputs = [of_guest(name, guest) for name in one.node.outputs[:3]]
        yield one.node.between([*rows, *own, *one.node.inputs[_TABLES]], outputs, of_guest(one.node.name, guest))

    def _of_table(self, one: _Attention, table: int) -> Iterable[bytes]:
        """Rows to their places in the caches, then one node that reads the caches of all slots."""
        attention, slots, group = one.node, self.sizes.num_slots, self.sizes.group
        base = of_table(attention.outputs[0], table)
        heads, num_heads = attention.integer("num_heads"), attention.integer("kv_num_heads")
        key, value = attention.inputs[_CACHES]
        size = int(sizes_of(self._ports[key].data)[3])
        shared = heads // num_heads
        times = 1 if group * shared >= _FEWEST_ROWS else _FEWEST_ROWS
        self._see(num_heads, group * shared * times, size)
        window = attention.integer("local_window_size", -1)
        self.window = min(self.window or window, window) if window > 0 else self.window
        rows = of_table(SLOT_ROWS, table)
        yield from self._rows(one, rows, [f"{base}.q", f"{base}.k", f"{base}.v"], [heads * size, num_heads * size])
        for name, count in ((f"{base}.q", heads), (f"{base}.k", num_heads)):
            yield from self._turned(attention, name, of_table(SLOT_POSITIONS, table), count, size)
        end = ".turned" if attention.integer("do_rotary") else ""
        turned = [f"{base}.q{end}", f"{base}.k{end}"]
        for cache, rows in ((key, turned[1]), (value, f"{base}.v")):
            yield node("Reshape", [rows, self._shape(-1, size)], [f"{rows}.heads"])
            inputs = [of_table(cache, table), of_table(SLOT_PLACES, table), f"{rows}.heads"]
            yield node("ScatterND", inputs, [of_table(f"{cache}.written", table)])
            self._written.append(cache)
        yield node("Reshape", [turned[0], self._shape(slots, group, num_heads, shared, size)], [f"{base}.by_head"])
        yield node("Transpose", [f"{base}.by_head"], [f"{base}.as_rows"], perm=[1, 3, 0, 2, 4])
        queries = f"{base}.as_rows"
        if times > 1:
            queries = f"{base}.twice"
            yield node("Concat", [f"{base}.as_rows"] * times, [queries], axis=0)
        yield node("Reshape", [queries, self._shape(1, -1, slots * num_heads * size)], [f"{base}.queries"])
        nothing = self._constant(np.zeros((1, 0, slots * num_heads * size), np.float32))
        caches = [of_table(f"{name}.written", table) for name in (key, value)]
        lengths = [of_table(name, table) for name in attention.inputs[_LENGTHS]]
        inputs = [f"{base}.queries", nothing, nothing, *caches, *lengths, "", "", "", of_table(SLOT_MASK, table)]
        yield self._over_slots(attention, inputs, f"{base}.found", slots * num_heads)
        shape = self._shape(group * times, shared, slots, num_heads, size)
        yield node("Reshape", [f"{base}.found", shape], [f"{base}.rows_found"])
        yield node("Transpose", [f"{base}.rows_found"], [f"{base}.heads_found"], perm=[2, 0, 3, 1, 4])
        by_slot = f"{base}.heads_found"
        if times > 1:  # the first of each two
            by_slot = f"{base}.once"
            yield node("Gather", [f"{base}.heads_found", self._constant(np.arange(group))], [by_slot], axis=1)
        yield node("Reshape", [by_slot, self._shape(1, slots * group, heads * size)], [base])

    def _rows(self, one: _Attention, places: str, outputs: Sequence[str], widths: Sequence[int]) -> Iterable[bytes]:
        """Queries, keys and values of the slots' rows, which may come in one."""
        if one.rows[1]:
            for name, output in zip(one.rows, outputs, strict=True):
                yield node("Gather", [name, places], [output], axis=1)
            return
        together, parts = f"{outputs[0]}kv", self._constant(np.array([*widths, widths[1]]))
        yield node("Gather", [one.rows[0], places], [together], axis=1)
        yield node("Split", [together, parts], outputs, axis=-1)

    def _turned(self, attention: _Node, name: str, positions: str, heads: int, size: int) -> Iterable[bytes]:
        """Rows by the angles of their positions, where attention does that itself."""
        if not attention.integer("do_rotary"):
            return
        cos, sin = attention.inputs[_TABLES][:2]
        width = 2 * self._known[cos][1]
        yield node(
            "RotaryEmbedding",
            [name, positions, cos, sin],
            [f"{name}.turned"],
            domain=_DOMAIN,
            num_heads=heads,
            interleaved=attention.integer("rotary_interleaved"),
            rotary_embedding_dim=width if width != size else 0,
        )

    def _see(self, num_heads: int, num_rows: int, size: int) -> None:
        if size > _WIDEST_HEAD:
            raise NotPackableError(f"heads of {size} are added up in parts, which depend on the longest text")
        if (num_heads, num_rows) != (self.num_heads or num_heads, self.num_rows or num_rows):
            raise NotPackableError("its layers attend in different ways")
        self.num_heads, self.num_rows = num_heads, num_rows

    @staticmethod
    def _over_slots(attention: _Node, inputs: Sequence[str], output: str, num_heads: int) -> bytes:
        written = node(_ATTENTION, inputs, [output], domain=_DOMAIN, num_heads=num_heads, kv_num_heads=num_heads)
        kept = [part for name, part in attention.attributes.items() if name not in _CHANGED]
        return written + joined(kept)

    def _shape(self, *sizes: int) -> str:
        return self._constant(np.array(sizes))

    def _constant(self, values: "np.ndarray") -> str:
        name = f"{values.dtype}.{list(values.shape)}.{values.tolist()}"
        self.constants[name] = tensor(name, values)
        return name

    def ports(self) -> list[Field]:
        """All inputs and outputs: what belongs to a conversation once for the slots and once for each guest."""
        found = list[Field]()
        guests, tables = range(self.sizes.num_guests), range(self.sizes.num_tables)
        for name, one in self._ports.items():
            kind = name.partition(".")[0]
            if kind not in _OF_A_CONVERSATION:
                found.append(one)
                continue
            own = [of_guest(name, guest) for guest in guests]
            own += [of_table(name, table) for table in tables if kind not in _PRESENT]
            found += [
                Field(one.number, port(own_name, element_type(one.data), len(sizes_of(one.data)))) for own_name in own
            ]
        for cache in dict.fromkeys(self._written):
            kind_of = element_type(self._ports[cache].data)
            found += [Field(_OUTPUT, port(of_table(f"{cache}.written", table), kind_of, 4)) for table in tables]
        whole = [(of_table(name, table), rank) for name, rank in _OF_SLOTS for table in tables]
        whole += [(OWN_ROWS, 1), *((guest_rows(guest), 1) for guest in guests)]
        found += [Field(_INPUT, port(name, "int64", rank)) for name, rank in whole]
        return found + [Field(_INPUT, port(of_table(SLOT_MASK, table), "float32", 4)) for table in tables]


_OF_SLOTS = ((SLOT_ROWS, 1), (SLOT_POSITIONS, 2), (SLOT_PLACES, 2))
_PRESENT = {name(0).partition(".")[0] for name in (names.present_key, names.present_value)}
_OF_A_CONVERSATION = {
    *(names.SEQLENS_K, names.TOTAL_LENGTH),
    *(name(0).partition(".")[0] for name in (names.past_key, names.past_value)),
    *_PRESENT,
}


def _name(port_: Field) -> str:
    (found,) = (part.text for part in fields(port_.data) if part.number == 1)
    return found


def _named_sizes(message: bytes) -> Iterable[tuple[str, list[int]]]:
    # A tensor's numbers may be written in ways that `fields` does not read: such tables are no attention's.
    try:
        parts = fields(message)
    except ValueError:
        return []
    sizes = [part.content for part in parts if part.number == 1 and isinstance(part.content, int)]
    return [(part.text, sizes) for part in parts if part.number == 8]
