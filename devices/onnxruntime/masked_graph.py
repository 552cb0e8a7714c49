"""A stage whose rows need not form a chain: a mask becomes an input of its attention, and so do their positions.

A head that reads such rows is told which of them are the text.

Rewritten in memory, as for conversations that share a pass (`packed_graph`): every other operator, and the weights'
file, stay what they are. Where rows do form a chain the mask is all zeros, and changes no bit on a processor. Behind a
row that is left out, sums have their terms in other places: such rows differ by rounding from those of a chain.

Owns: the rewriting, what a pass tells it, and which targets it can be done to. Does not own: who wants trees.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, Field, NotRewritableError, field, fields, joined, node
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import TensorSpec
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import TargetEntry

TABLE_ROWS = "table_rows"
"""`[cache rows]`: which row of the tables of angles each one takes, its position in the text."""
MASK = "row_mask"
"""`[1, 1, rows, cache rows and these]`: 0 where a row sees another, else as low as the type goes."""
PASS_ROWS = "pass_rows"
"""`[R]`: rows of the target's last pass that a head reads, in the order of the text."""
_GRAPH, _NODE, _INPUT = 7, 1, 11
_INPUTS, _OUTPUTS, _OPERATOR, _ATTRIBUTE, _NAME = 1, 2, 4, 5, 1
_ATTENTION = "GroupQueryAttention"
_TABLES, _AT_POSITIONS, _AT_MASK = slice(7, 9), 9, 10
"""Places among the inputs of attention."""
_MASKED_TYPES = ("float32", "float16")
_PROBE, _PROBE_ROWS, _PROBE_PARENTS = range(3, 6), [*range(6, 22)], [-1, *[0] * 14, 14]
"""A text, and a tree behind it: of 14 rows beside each other, the last has one behind it. So a row that sees what it
should not, or stands where it should not, sees much and stands far off."""
MOST_APART = 0.1
"""Of the logits' spread. Rounding is 0.034 of it at the most, what a mask or a table that is ignored does 0.41 at least
(`bench/studies/trees/mask_probe.py`: the storyteller, SmolLM2 and Qwen2.5, int8)."""


class NotMaskableError(NotRewritableError):
    """A stage whose attention cannot be told which rows see each other."""


def mask_specs(dtype: str) -> tuple[TensorSpec, TensorSpec]:
    """What a masked stage has as inputs beside those of its contract."""
    table_rows = TensorSpec(name=TABLE_ROWS, dtype="int64", shape=("C",))
    return table_rows, TensorSpec(name=MASK, dtype=dtype, shape=(1, 1, "S", "T"))


def why_not(entry: TargetEntry) -> str:
    """Why a target takes no trees, whatever it runs on; empty if it does."""
    if entry.shape.recurrent_layers:
        return "the target has recurrent layers, which read every row of a pass in turn"
    if entry.shape.dtype not in _MASKED_TYPES:
        return f"the target computes in {entry.shape.dtype}, for which no mask can be made"
    return ""


def masked(model: bytes, dtype: str) -> bytes:
    """A stage whose attention reads `MASK`, and its tables of angles by `TABLE_ROWS`.

    Its own input for positions would say the same; some providers take it and do not look at it.

    Raises:
        NotMaskableError: attention has a mask already, or sees so many rows back only; or something else counts rows.
        ValueError: these are not the bytes of a graph.
    """
    return joined([_with_graph(part, dtype) if part.number == _GRAPH else part for part in fields(model)])


def _with_graph(part: Field, dtype: str) -> Field:
    parts = fields(part.data)
    nodes = [fields(one.data) for one in parts if one.number == _NODE]
    tables = sorted({name for one in nodes if _is_attention(one) for name in _texts(one, _INPUTS)[_TABLES] if name})
    made = {name for one in nodes for name in _texts(one, _OUTPUTS)}
    if computed := made.intersection(tables):
        raise NotMaskableError(f"its table {min(computed)} is computed in every pass")
    gathered = [Field(_NODE, node("Gather", [name, TABLE_ROWS], [_by_row(name)], axis=0)) for name in tables]
    rest = [Field(_NODE, _with_mask(fields(one.data))) if one.number == _NODE else one for one in parts]
    ports = [Field(_INPUT, _port(TABLE_ROWS, "int64", 1)), Field(_INPUT, _port(MASK, dtype, 4))]
    return Field(_GRAPH, joined([*gathered, *rest, *ports]))


def _texts(parts: Sequence[Field], number: int) -> list[str]:
    return [part.text for part in parts if part.number == number]


def _is_attention(parts: Sequence[Field]) -> bool:
    return _ATTENTION in _texts(parts, _OPERATOR)


def _by_row(table: str) -> str:
    return f"{table}.by_row"


def _port(name: str, dtype: str, rank: int) -> bytes:
    sizes = b"".join(field(1, field(2, f"{name}{number}")) for number in range(rank))
    return field(1, name) + field(2, field(1, field(1, ONNX_TYPES[dtype]) + field(2, sizes)))


def _with_mask(parts: Sequence[Field]) -> bytes:
    inputs = _texts(parts, _INPUTS)
    if not _is_attention(parts):
        if counted := {names.SEQLENS_K, names.TOTAL_LENGTH}.intersection(inputs):
            raise NotMaskableError(f"more than attention reads {min(counted)}, as learned positions do")
        return joined(parts)
    window = field(_NAME, "local_window_size")
    if any(part.number == _ATTRIBUTE and part.data.startswith(window) for part in parts):
        raise NotMaskableError("its attention sees so many rows back only, and counts those that are left out")
    inputs += [""] * (_AT_MASK + 1 - len(inputs))
    if inputs[_AT_POSITIONS] or inputs[_AT_MASK]:
        raise NotMaskableError("its attention has a mask already")
    inputs[_TABLES] = [_by_row(name) if name else "" for name in inputs[_TABLES]]
    inputs[_AT_MASK] = MASK
    return joined(
        [Field(_INPUTS, name.encode()) for name in inputs] + [part for part in parts if part.number != _INPUTS]
    )


def rows_spec() -> TensorSpec:
    """What a head's stage of `reading_rows` has as an input beside those of its contract."""
    return TensorSpec(name=PASS_ROWS, dtype="int64", shape=("R",))


def reading_rows(model: bytes, taps: Sequence[str]) -> bytes:
    """A head's stage that reads rows `PASS_ROWS` of its inputs `taps`, where its own reads the first ones.

    Raises:
        ValueError: these are not the bytes of a graph.
    """
    return joined([_with_rows(part, taps) if part.number == _GRAPH else part for part in fields(model)])


def _with_rows(part: Field, taps: Sequence[str]) -> Field:
    parts = fields(part.data)
    gathered = [Field(_NODE, node("Gather", [name, PASS_ROWS], [_by_row(name)], axis=1)) for name in taps]
    rest = [Field(_NODE, _renamed(fields(one.data), taps)) if one.number == _NODE else one for one in parts]
    return Field(_GRAPH, joined([*gathered, *rest, Field(_INPUT, _port(PASS_ROWS, "int64", 1))]))


def _renamed(parts: Sequence[Field], taps: Sequence[str]) -> bytes:
    """A node that reads gathered rows in place of these inputs."""
    return joined(
        [
            Field(_INPUTS, _by_row(part.text).encode()) if part.number == _INPUTS and part.text in taps else part
            for part in parts
        ]
    )


class Probed(Protocol):
    """A session whose passes may have trees."""

    def logits(
        self, tokens: NDArray[np.int64], start: int, parents: NDArray[np.int64] | None = None
    ) -> NDArray[np.floating]:
        """What a pass says at its rows, `[S, V]`."""


def check_masks(session: Probed, provider: str) -> None:
    """Refuse a provider that takes the inputs of masked stages and does not look at them.

    Raises:
        DeviceError: rows of a tree are not those of its chains.
    """
    apart = rows_apart(session)
    if not apart <= MOST_APART:
        raise DeviceError(
            f"{provider} takes the mask of siblings and does not follow it: rows differ by {apart:.2g} of their spread "
            "from those of a text alone. Nothing was run. Leave them out (siblings=0)."
        )


def rows_apart(session: Probed) -> float:
    """How far rows of a tree are from those of its chains alone, over the spread of these; runs a text of its own."""
    text, rows = np.array([*_PROBE]), np.array(_PROBE_ROWS)
    session.logits(text, 0)
    together = session.logits(rows, len(text), np.array(_PROBE_PARENTS))
    found = 0.0
    for path in ([0, 1], [0, 14, 15]):
        alone = session.logits(rows[path], len(text))
        found = max(found, float(np.abs(together[path] - alone).mean(axis=1).max() / alone.std()))
    return found


class RowLayout:
    """Where rows stand and what they see, from position `start` on."""

    def __init__(self, count: int, start: int, parents: Sequence[int] | None) -> None:
        """The first of `count` rows follow their `parents` (-1: the cache), those behind them each other."""
        followed = [*(parents if parents is not None else ())]
        followed += range(len(followed) - 1, count - 1)
        self._start, self._count = start, count
        self._depths = np.zeros(count, dtype=np.int64)
        self._sees = None if parents is None else np.eye(count, dtype=np.bool_)
        for row, parent in enumerate(followed):
            if parent >= 0:
                self._depths[row] = self._depths[parent] + 1
                if self._sees is not None:
                    self._sees[row] |= self._sees[parent]

    def table_rows(self, capacity: int) -> NDArray[np.int64]:
        """`[capacity]`."""
        found = np.arange(capacity)
        own = found[self._start : self._start + self._count]
        own[:] = self._start + self._depths[: len(own)]
        return found

    def mask(self, dtype: str, num_columns: int) -> NDArray[np.floating]:
        """`[1, 1, rows, num_columns]`: what stands behind these rows counts for nothing anyway."""
        found = np.zeros((1, 1, self._count, num_columns), dtype=dtype)
        if self._sees is not None:
            own = found[0, 0, :, self._start : self._start + self._count]
            own[~self._sees] = np.finfo(dtype).min
        return found
