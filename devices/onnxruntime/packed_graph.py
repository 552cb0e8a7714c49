"""One graph for rows of several conversations: a stage of a bundle, rewritten in memory when there are several.

All rows go through every product together. Attention is computed by the operator of the stage, in two ways:

* A *slot* is for a conversation that brings few rows, as a rule one. One node attends for all slots of a *table*, and
  takes as long as if each brought as many rows as any, behind the longest text. To it, each head of keys and values of
  each slot is a head of its own, and the heads of queries that share it are the rows. Texts differ in length, which a
  mask says: what stands behind a text is added as zeros. All tables' caches are parts of one room, whose new keys and
  values are written at once; that tables read them afterwards is said by inputs that hold nothing.
* A *guest* brings as many rows as it has, as a part of a prompt. Each has a node of its own.

Either way a row has the bits that it has alone. Weights stay where they are, in the bundle's file.

Owns: the rewriting, and what its inputs are called. Does not own: which conversation has which place (`batch`).

Around every attention node a stage has `rows -> Pad -> attention -> Slice`, where the padding is the spare row that
keeps a single row from another routine (`TargetEntry.spare_rows`). A guest's rows are gathered with a spare one; slots
need none where queries share a head, and have a single row twice where not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mirrorsd.devices.onnxruntime.onnx_bytes import (
    Field,
    Node,
    NotRewritableError,
    element_type,
    fields,
    joined,
    node,
    port,
    sizes_of,
    tensor,
)
from mirrorsd.graphs import names

SLOT_HEADS = "slot_heads"
"""`[numbers]`: which heads of which rows each table attends, then which keys and values are kept. All rows' heads of
queries, keys and values are counted through, row by row."""
SLOT_SIZES = "slot_sizes"
"""`[tables + 1]`: how many of them each table has, and how many are kept."""
ROW_POSITIONS = "row_positions"
"""`[1, rows]`: where in its text each row of the pass stands."""
SLOT_PLACES = "slot_places"
"""`[kept, 1]`: where in the slots' room keys and values go."""
SLOT_MASK = "slot_mask"
"""`[1, slots x heads, rows, length]`, for each table: 0 where a row may look, `-inf` behind its text."""
OWN_HEADS = "own_heads"
"""`[rows x heads]`: where among all that was attended, by tables, then by guests, the pass's own rows' heads are."""
_GRAPH, _NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 7, 1, 5, 11, 12, 13
_DOMAIN = "com.microsoft"
_ATTENTION = "GroupQueryAttention"
_ROWS, _CACHES, _LENGTHS, _TABLES = slice(0, 3), slice(3, 5), slice(5, 7), slice(7, None)
"""Inputs of attention: queries, keys and values; past ones; two lengths; tables of angles, and rarer ones."""
_WIDEST_HEAD, _FEWEST_BEHIND = 128, 64
"""Numbers that ONNX Runtime's product adds up in one go, however long a text is. More of them it does behind so many
tokens at the most, and in parts of as many behind longer texts."""
_CHANGED = {"num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size"}


class NotPackableError(NotRewritableError):
    """A stage in which rows of several conversations cannot be told apart."""


class Sizes(NamedTuple):
    """How many conversations a graph takes: tables of so many slots, and so many guests."""

    num_tables: int
    num_slots: int
    num_guests: int
    spare_rows: int


class Heads(NamedTuple):
    """How a stage attends: so many heads of keys and values, each shared by so many of queries."""

    num_heads: int
    num_shared: int


class Packed(NamedTuple):
    """A rewritten stage.

    Attributes:
        model: its bytes.
        heads: how it attends.
        fewest: a slot's text must have more tokens.
        window: most that it may have, as its attention looks no further back; 0 for any number.
    """

    model: bytes
    heads: Heads
    fewest: int
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


def of_room(cache: str) -> str:
    """What the keys and values of all slots together are called, `[places, size]`, by those of one conversation.

    >>> of_room("past_key.3")
    'past_key.3.room'
    """
    return f"{cache}.room"


def guest_rows(guest: int) -> str:
    """`[rows and spare ones]`: which rows of the pass a guest has.

    >>> guest_rows(0)
    'guest0_rows'
    """
    return f"guest{guest}_rows"


class _Attention(NamedTuple):
    """A node of attention, and what stands around it: rows without spare ones, and what it makes of them."""

    node: Node
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
    nodes = [Node(one.data) for one in parts if one.number == _NODE]
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
    assert writer.heads is not None  # it has attention
    return Packed(found, writer.heads, writer.fewest, writer.window)


def check_packable(nodes: Sequence[Node], constants: set[str]) -> None:
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


def _attentions(nodes: Sequence[Node], spare_rows: int) -> Iterable[_Attention]:
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


def _around(nodes: Sequence[Node], attentions: Iterable[_Attention], spare_rows: int) -> set[int]:
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
        self.heads: Heads | None = None
        self.fewest = self.window = 0
        self._ports, self._known = ports, constants
        self._rooms: list[str] = []

    def attention(self, one: _Attention) -> Iterable[bytes]:
        """Attention of all slots and of every guest, put together in the pass's order."""
        attention, sizes = one.node, self.sizes
        base, (key, _) = attention.outputs[0], attention.inputs[_CACHES]
        heads, num_heads = attention.integer("num_heads"), attention.integer("kv_num_heads")
        size = int(sizes_of(self._ports[key].data)[3])
        shared = heads // num_heads
        self._see(num_heads, shared, size)
        window = attention.integer("local_window_size", -1)
        self.window = min(self.window or window, window) if window > 0 else self.window
        yield from self._heads_of_rows(one, f"{base}.heads", heads, num_heads, size)
        tables = [of_table(f"{base}.rows", table) for table in range(sizes.num_tables)]
        yield node("Gather", [f"{base}.heads", SLOT_HEADS], [f"{base}.seated"], axis=0)
        yield node("Split", [f"{base}.seated", SLOT_SIZES], [*tables, f"{base}.kept"], axis=0)
        yield from self._keep(base, key, sizes.num_slots * num_heads * size)
        by_head, found = self._shape(-1, size), list[str]()
        for table in range(sizes.num_tables):
            yield from self._of_table(attention, table, sizes.num_slots * num_heads, size)
            found.append(of_table(base, table))
        for guest in range(sizes.num_guests):
            yield from self._of_guest(one, guest)
            found.append(of_guest(base, guest))
        for name in found:
            yield node("Reshape", [name, by_head], [f"{name}.heads"])
        yield node("Concat", [f"{name}.heads" for name in found], [f"{base}.all"], axis=0)
        yield node("Gather", [f"{base}.all", OWN_HEADS], [f"{base}.own"], axis=0)
        yield node("Reshape", [f"{base}.own", self._shape(1, -1, heads * size)], [one.attended])

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

    def _heads_of_rows(self, one: _Attention, output: str, heads: int, num_heads: int, size: int) -> Iterable[bytes]:
        """`[rows x heads, size]`: queries and keys of all rows, turned by their positions, and values."""
        attention, rows = one.node, [name for name in one.rows if name]
        if attention.integer("do_rotary"):
            turning, still = [f"{output}.turning"], f"{output}.still"
            if len(rows) == 1:
                widths = self._constant(np.array([(heads + num_heads) * size, num_heads * size]))
                yield node("Split", [rows[0], widths], [*turning, still], axis=-1)
            else:
                yield node("Concat", rows[:2], turning, axis=-1)
                still = rows[2]
            cos, sin = attention.inputs[_TABLES][:2]
            width = 2 * self._known[cos][1]
            yield node(
                "RotaryEmbedding",
                [*turning, ROW_POSITIONS, cos, sin],
                [f"{output}.turned"],
                domain=_DOMAIN,
                num_heads=heads + num_heads,
                interleaved=attention.integer("rotary_interleaved"),
                rotary_embedding_dim=width if width != size else 0,
            )
            rows = [f"{output}.turned", still]
        if len(rows) > 1:
            yield node("Concat", rows, [f"{output}.together"], axis=-1)
            rows = [f"{output}.together"]
        yield node("Reshape", [*rows, self._shape(-1, size)], [output])

    def _keep(self, base: str, key: str, width: int) -> Iterable[bytes]:
        """Keys and values to their places; and none of them, for tables to read, so that they wait for that."""
        room, nothing = of_room(key), self._constant(np.zeros(1, np.int64))
        yield node("ScatterND", [room, SLOT_PLACES, f"{base}.kept"], [f"{room}.written"])
        yield node("Slice", [f"{room}.written", nothing, nothing], [f"{base}.none"])
        yield node("Reshape", [f"{base}.none", self._shape(1, 0, width)], [f"{base}.nothing"], allowzero=1)
        self._rooms.append(key)

    def _of_table(self, attention: Node, table: int, num_heads: int, size: int) -> Iterable[bytes]:
        """One node that reads the caches of all slots of a table."""
        base, nothing = attention.outputs[0], f"{attention.outputs[0]}.nothing"
        rows, queries = of_table(f"{base}.rows", table), of_table(f"{base}.queries", table)
        yield node("Reshape", [rows, self._shape(1, -1, num_heads * size)], [queries])
        own = [of_table(name, table) for name in (*attention.inputs[_CACHES], *attention.inputs[_LENGTHS])]
        inputs = [queries, nothing, nothing, *own, "", "", "", of_table(SLOT_MASK, table)]
        output = [of_table(base, table)]
        written = node(_ATTENTION, inputs, output, domain=_DOMAIN, num_heads=num_heads, kv_num_heads=num_heads)
        yield written + joined([part for name, part in attention.attributes.items() if name not in _CHANGED])

    def _see(self, num_heads: int, shared: int, size: int) -> None:
        found = Heads(num_heads, shared)
        if found != (self.heads or found):
            raise NotPackableError("its layers attend in different ways")
        self.heads, self.fewest = found, max(self.fewest, _FEWEST_BEHIND if size > _WIDEST_HEAD else 0)

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
        for cache in dict.fromkeys(self._rooms):
            kind_of, room = element_type(self._ports[cache].data), of_room(cache)
            found += [Field(_INPUT, port(room, kind_of, 2)), Field(_OUTPUT, port(f"{room}.written", kind_of, 2))]
        whole = [*_OF_SLOTS, *((guest_rows(guest), 1) for guest in guests)]
        found += [Field(_INPUT, port(name, "int64", rank)) for name, rank in whole]
        return found + [Field(_INPUT, port(of_table(SLOT_MASK, table), "float32", 4)) for table in tables]


_OF_SLOTS = ((SLOT_HEADS, 1), (SLOT_SIZES, 1), (ROW_POSITIONS, 2), (SLOT_PLACES, 2), (OWN_HEADS, 1))
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
