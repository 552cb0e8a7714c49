"""A stage whose rows need not form a chain: positions and a mask become inputs of its attention.

Rewritten in memory, as for conversations that share a pass (`packed_graph`): every other operator, and the weights'
file, stay what they are. Where rows do form a chain the mask is all zeros, and changes no bit on a processor. Behind a
row that is left out, sums have their terms in other places: such rows differ by rounding from those of a chain.

Owns: the rewriting, what a pass tells it, and which targets it can be done to. Does not own: who wants trees.
"""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.graphs.contract import TensorSpec
from mirrorsd.graphs.manifest import TargetEntry
from mirrorsd.runtime.backends.onnxruntime.onnx_bytes import Field, field, fields, joined, port
from mirrorsd.runtime.backends.onnxruntime.stage import Place

POSITIONS = "row_positions"
"""`[1, rows]`: where in its text each row stands."""
MASK = "row_mask"
"""`[1, 1, rows, cache rows and these]`: 0 where a row sees another, else as low as the type goes."""
_GRAPH, _NODE, _INPUT = 7, 1, 11
_INPUTS, _OPERATOR, _ATTRIBUTE, _NAME = 1, 4, 5, 1
_ATTENTION = "GroupQueryAttention"
_AT_POSITIONS, _AT_MASK = 9, 10
"""Places among the inputs of attention."""
_MASKED_TYPES = ("float32", "float16")


class NotMaskableError(ValueError):
    """A stage whose attention cannot be told which rows see each other."""


def mask_specs(dtype: str) -> tuple[TensorSpec, TensorSpec]:
    """What a masked stage has as inputs beside those of its contract."""
    positions = TensorSpec(name=POSITIONS, dtype="int64", shape=(1, "S"))
    return positions, TensorSpec(name=MASK, dtype=dtype, shape=(1, 1, "S", "T"))


def why_not(entry: TargetEntry) -> str:
    """Why a target takes no trees, whatever it runs on; empty if it does."""
    if entry.shape.recurrent_layers:
        return "the target has recurrent layers, which read every row of a pass in turn"
    if entry.shape.dtype not in _MASKED_TYPES:
        return f"the target computes in {entry.shape.dtype}, for which no mask can be made"
    return ""


def masked(model: bytes, dtype: str) -> bytes:
    """A stage whose attention reads `POSITIONS` and `MASK`.

    Raises:
        NotMaskableError: attention has a mask already, or sees so many rows back only.
        ValueError: these are not the bytes of a graph.
    """
    return joined([_with_graph(part, dtype) if part.number == _GRAPH else part for part in fields(model)])


def _with_graph(part: Field, dtype: str) -> Field:
    parts = [Field(_NODE, _with_mask(one.data)) if one.number == _NODE else one for one in fields(part.data)]
    ports = [Field(_INPUT, port(POSITIONS, "int64", 2)), Field(_INPUT, port(MASK, dtype, 4))]
    return Field(_GRAPH, joined([*parts, *ports]))


def _with_mask(node: bytes) -> bytes:
    parts = fields(node)
    if not any(part.number == _OPERATOR and part.text == _ATTENTION for part in parts):
        return node
    inputs = [part.text for part in parts if part.number == _INPUTS]
    window = field(_NAME, "local_window_size")
    if any(part.number == _ATTRIBUTE and part.data.startswith(window) for part in parts):
        raise NotMaskableError("its attention sees so many rows back only, and counts those that are left out")
    inputs += [""] * (_AT_MASK + 1 - len(inputs))
    if inputs[_AT_POSITIONS] or inputs[_AT_MASK]:
        raise NotMaskableError("its attention has a mask already")
    inputs[_AT_POSITIONS], inputs[_AT_MASK] = POSITIONS, MASK
    return joined(
        [Field(_INPUTS, name.encode()) for name in inputs] + [part for part in parts if part.number != _INPUTS]
    )


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

    @property
    def positions(self) -> NDArray[np.int64]:
        """`[1, rows]`."""
        return (self._start + self._depths)[None]

    def mask(self, dtype: str, num_columns: int) -> NDArray[np.floating]:
        """`[1, 1, rows, num_columns]`: what stands behind these rows counts for nothing anyway."""
        found = np.zeros((1, 1, self._count, num_columns), dtype=dtype)
        if self._sees is not None:
            own = found[0, 0, :, self._start : self._start + self._count]
            own[~self._sees] = np.finfo(dtype).min
        return found


class PassMask:
    """The inputs of a pass's masked stages, of which the mask is as wide as the cache is long by then.

    A captured pass has the whole cache's length and fixed addresses; else the mask is another tensor in every pass.
    """

    def __init__(self, place: Place, count: int, dtype: str, fixed_columns: int | None) -> None:
        """Make those of `count` rows, spare ones included."""
        self._count, self._dtype = count, dtype
        self._positions = place.message((1, count), "int64")
        self._fixed = place.message((1, 1, count, fixed_columns), dtype) if fixed_columns else None

    @property
    def values(self) -> dict[str, ort.OrtValue]:
        """What is bound first."""
        mask = (
            self._fixed.value if self._fixed is not None else self._value(RowLayout(self._count, 0, None), self._count)
        )
        return {POSITIONS: self._positions.value, MASK: mask}

    def write(self, start: int, parents: Sequence[int] | None, num_columns: int) -> dict[str, ort.OrtValue]:
        """Set them for rows from `start` on; what has to be bound again."""
        layout = RowLayout(self._count, start, parents)
        self._positions.write(layout.positions)
        if self._fixed is None:
            return {MASK: self._value(layout, num_columns)}
        self._fixed.write(layout.mask(self._dtype, self._fixed.value.shape()[3]))
        return {}

    def _value(self, layout: RowLayout, num_columns: int) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(layout.mask(self._dtype, num_columns))
