"""One graph for rows of several conversations: a stage of a bundle, rewritten in memory when there are several.

All rows go through every product together; attention is computed per slot, over the slot's own cache, by the very
operator of the stage, so that a row has the bits that it has alone. Weights stay where they are, in the bundle's file.

Owns: the rewriting, and what its inputs are called. Does not own: which conversation has which slot (`batch`).

Around every attention node a stage has `rows -> Pad -> attention -> Slice`, where the padding is the spare row that
keeps a single row from another routine (`TargetEntry.spare_rows`). Here it is `rows -> Gather -> Split -> attention of
each slot -> Concat -> Gather`: the first gathering repeats a row of each slot as its spare one, the second leaves it
out. So a slot more costs one node, and a slot without a conversation costs attention of one row over nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mirrorsd.graphs import names
from mirrorsd.runtime.backends.onnxruntime.onnx_bytes import ONNX_TYPES, Field, field, fields, joined, node

SLOT_ROWS = "slot_rows"
"""`[rows and spare ones]`: which row of the pass stands there, slot by slot."""
ROWS_OF_SLOTS = "rows_of_slots"
"""`[slots]`: how many of these each slot has."""
OWN_ROWS = "own_rows"
"""`[rows]`: where among these the pass's own ones are."""
_GRAPH, _NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 7, 1, 5, 11, 12, 13
_OF_NODE = {"input": 1, "output": 2, "name": 3, "operator": 4}
_ATTENTION = "GroupQueryAttention"
_ROWS, _CACHES, _LENGTHS, _TABLES = slice(0, 3), slice(3, 5), slice(5, 7), slice(7, None)
"""Inputs of attention: queries, keys and values; past ones; two lengths; tables of angles, and rarer ones."""


class NotPackableError(ValueError):
    """A stage in which rows of several conversations cannot be told apart."""


def in_slot(name: str, slot: int) -> str:
    """What an input or output of one conversation is called for a slot.

    >>> in_slot("past_key.3", 1)
    'past_key.3.slot1'
    """
    return f"{name}.slot{slot}"


class _Node:
    """A node: its fields, and what can be read off them."""

    def __init__(self, message: bytes) -> None:
        self.parts = fields(message)
        self.inputs, self.outputs = self._texts("input"), self._texts("output")
        self.name, self.operator = "".join(self._texts("name")), "".join(self._texts("operator"))

    def _texts(self, kind: str) -> list[str]:
        return [part.text for part in self.parts if part.number == _OF_NODE[kind]]

    def between(self, inputs: Sequence[str], outputs: Sequence[str], name: str) -> bytes:
        """The same operator between other values."""
        own = [Field(1, value.encode()) for value in inputs] + [Field(2, value.encode()) for value in outputs]
        rest = [part for part in self.parts if part.number not in (1, 2, 3)]
        return joined([*own, Field(3, name.encode()), *rest])


def packed(model: bytes, num_slots: int, spare_rows: int) -> bytes:
    """A stage for `num_slots` conversations at once.

    Its caches and lengths are inputs and outputs per slot (`in_slot`), rows are those of all slots, one after another.

    Raises:
        NotPackableError: something but attention depends on where in its text a row stands.
        ValueError: these are not the bytes of a graph.
    """
    return joined(
        [_with_graph(part, num_slots, spare_rows) if part.number == _GRAPH else part for part in fields(model)]
    )


def _with_graph(part: Field, num_slots: int, spare_rows: int) -> Field:
    parts = fields(part.data)
    nodes = [_Node(one.data) for one in parts if one.number == _NODE]
    constants = {name for one in parts if one.number == _INITIALIZER for name in _names_of_tensor(one.data)}
    check_packable(nodes, constants)
    ports: list[Field] = []
    for one in parts:
        if one.number in (_INPUT, _OUTPUT):
            ports += _ports(one, num_slots)
    inputs = [Field(_INPUT, _indices(name)) for name in (SLOT_ROWS, ROWS_OF_SLOTS, OWN_ROWS)]
    rest = [one for one in parts if one.number not in (_NODE, _INPUT, _OUTPUT, _VALUE_INFO)]
    rewritten = [Field(_NODE, one) for one in _packed_nodes(nodes, num_slots, spare_rows)]
    return Field(_GRAPH, joined([*rewritten, *rest, *ports, *inputs]))


def _names_of_tensor(tensor: bytes) -> Iterable[str]:
    # A tensor's numbers may be written in ways that `fields` does not read; its name is asked for alone.
    try:
        return [part.text for part in fields(tensor) if part.number == 8]
    except ValueError:
        return []


def check_packable(nodes: Sequence[_Node], constants: set[str]) -> None:
    """Refuse a stage in which more than attention asks for lengths, or attention for more than tables.

    Raises:
        NotPackableError: says which.
    """
    if not any(one.operator == _ATTENTION for one in nodes):
        raise NotPackableError("it has no GroupQueryAttention")
    for one in nodes:
        if one.operator == _ATTENTION:
            computed = [name for name in one.inputs[_TABLES] if name and name not in constants]
        else:
            computed = [name for name in one.inputs if name in (names.SEQLENS_K, names.TOTAL_LENGTH)]
        if computed:
            raise NotPackableError(f"{one.operator} {one.name} reads {computed[0]}")


def _packed_nodes(nodes: Sequence[_Node], num_slots: int, spare_rows: int) -> Iterable[bytes]:
    producers = {name: one for one in nodes for name in one.outputs if name}
    readers = Counter(name for one in nodes for name in one.inputs)
    replaced: set[int] = set()
    attentions: dict[int, tuple[list[str], str]] = {}
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
            replaced |= {id(left_out) for left_out in (*pads, *cuts)}
            rows, attended = [producers[name].inputs[0] if name else "" for name in rows], cuts[0].outputs[0]
        attentions[id(one)] = (rows, attended)
    for one in nodes:
        if id(one) in attentions:
            yield from _by_slots(one, *attentions[id(one)], num_slots, spare_rows)
        elif id(one) not in replaced:
            yield joined(one.parts)


def _by_slots(one: _Node, rows: Sequence[str], attended: str, num_slots: int, spare_rows: int) -> Iterable[bytes]:
    """Attention of each slot, over its own cache."""
    own = one.outputs[0]
    slots = range(num_slots)
    of_slots: list[list[str]] = []
    for number, name in enumerate(rows):
        if not name:
            of_slots.append([""] * num_slots)
            continue
        if spare_rows:
            found = f"{own}.rows{number}"
            yield node("Gather", [name, SLOT_ROWS], [found], axis=1)
            name = found
        of_slots.append([in_slot(f"{own}.rows{number}", slot) for slot in slots])
        yield node("Split", [name, ROWS_OF_SLOTS], of_slots[-1], axis=1)
    for slot in slots:
        inputs = [found[slot] for found in of_slots]
        inputs += [in_slot(name, slot) for name in (*one.inputs[_CACHES], *one.inputs[_LENGTHS])]
        outputs = [in_slot(name, slot) for name in one.outputs[:3]]
        yield one.between([*inputs, *one.inputs[_TABLES]], outputs, in_slot(one.name, slot))
    together = f"{own}.slots" if spare_rows else attended
    yield node("Concat", [in_slot(own, slot) for slot in slots], [together], axis=1)
    if spare_rows:
        yield node("Gather", [together, OWN_ROWS], [attended], axis=1)


def _ports(port: Field, num_slots: int) -> list[Field]:
    """An input or output: one for each slot where it belongs to a conversation."""
    (name,) = (part.text for part in fields(port.data) if part.number == 1)
    if name.partition(".")[0] not in _OF_A_CONVERSATION:
        return [port]
    return [Field(port.number, _renamed(port.data, in_slot(name, slot), slot)) for slot in range(num_slots)]


_OF_A_CONVERSATION = {
    *(names.SEQLENS_K, names.TOTAL_LENGTH),
    *(name(0).partition(".")[0] for name in (names.past_key, names.past_value, names.present_key, names.present_value)),
}


def _renamed(port: bytes, name: str, slot: int) -> bytes:
    parts = [Field(1, name.encode()) if part.number == 1 else part for part in fields(port)]
    return joined([Field(2, _with_own_sizes(part.data, slot, depth=0)) if part.number == 2 else part for part in parts])


_PATH_TO_SIZES = (1, 2, 1, 2)
"""From a value's type to the names of its sizes: tensor, shape, dimension, name."""


def _with_own_sizes(message: bytes, slot: int, *, depth: int) -> bytes:
    """Sizes that have names get others for each slot: conversations may have caches of different sizes."""
    found = []
    for part in fields(message):
        if part.number == _PATH_TO_SIZES[depth] and isinstance(part.content, bytes):
            is_name = depth == len(_PATH_TO_SIZES) - 1
            inner = part.data + b"%d" % slot if is_name else _with_own_sizes(part.data, slot, depth=depth + 1)
            part = Field(part.number, inner)
        found.append(part)
    return joined(found)


def _indices(name: str) -> bytes:
    """A port of whole numbers, `[n]`."""
    shape = field(1, field(2, name))
    return field(1, name) + field(2, field(1, field(1, ONNX_TYPES["int64"]) + field(2, shape)))
