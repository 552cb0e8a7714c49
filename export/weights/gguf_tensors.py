"""Tensors of a GGUF file: as floats, and as the blocks of integers that the file holds.

Owns: reading both, a few rows at a time, and which weights of a bundle stay as they are in the file. Does not own: what
a block's bytes say (`gguf_blocks.py`), which tensor of Hugging Face's model is which of the file's
(`checkpoints/gguf_file.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mirrorsd.export.weights.gguf_blocks import FLOATS, KINDS, BlockKind, Levels
from mirrorsd.export.weights.lazy_weight import JOINED, TRANSPOSED
from mirrorsd.export.weights.stored_tensors import CHUNK_BYTES, StoredTensor

Array = npt.NDArray[Any]

_FLOATS = "floats"
_AT_ONCE = 1 << 18
"""Numbers of a file's blocks that are undone together: their parts stay in a processor's cache
(`bench/studies/weights/gguf_speed.py`)."""
_ROUNDED_BITS = 9
"""A weight in 8 bits, and its share of the scale of 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor(StoredTensor):
    """One tensor of a file: `dtype` is the file's word for its numbers ("Q4_1"), `shape` Hugging Face's.

    Attributes:
        content: The file's bytes or floats, mapped, a row of the tensor in each row.
        kind: The `gguf` package's number for `dtype`.
        order: Which row of the file each row is. None where Hugging Face's tensor is more than the file's rows in
            another order; then `convert` makes it of all of them.
        convert: What transformers does to the file's floats.
    """

    content: Array
    kind: Any
    order: Array | None
    convert: Callable[[Array], Array]

    def check_readable(self) -> None:
        """Accept every kind: those that cannot be undone were refused when the file was opened."""

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Undo the blocks in order, some rows `[n, ...]` at a time, as `dtype`."""
        if self.order is None:
            yield torch.from_numpy(np.array(self.convert(self._floats(self.content)), np.float32)).to(dtype)
            return
        for rows in self._rows():
            yield torch.from_numpy(np.ascontiguousarray(self._floats(rows), np.float32)).to(dtype)

    def _rows(self) -> Iterator[Array]:
        """The file's rows in order, some at a time: so many that their floats take `CHUNK_BYTES`."""
        assert self.order is not None  # callers have looked
        step = max(1, CHUNK_BYTES // max(1, 4 * self.size // len(self.order)))
        for start in range(0, len(self.order), step):
            yield np.ascontiguousarray(self.content[self.order[start : start + step]])

    def _floats(self, rows: Array) -> Array:
        """What `gguf.quants.dequantize` makes of `rows` `[..., bytes]`, in a third of its time: it takes 16 at once."""
        from gguf import quants  # an optional package: other checkpoints do without it

        if self.has_floats and self.dtype != "BF16":
            return np.asarray(quants.dequantize(rows, self.kind))
        form = getattr(quants, self.dtype)
        form.init_grid()
        row_bytes = rows.shape[-1]
        flat, width = rows.reshape(-1, row_bytes), row_bytes // form.type_size * form.block_size
        floats, step = np.empty((len(flat), width), np.float32), max(1, _AT_ONCE // width)
        for start in range(0, len(flat), step):
            floats[start : start + step] = form.dequantize_rows(flat[start : start + step])
        return floats.reshape(*rows.shape[:-1], width)

    @property
    def blocks(self) -> BlockKind | None:
        """How a product holds the file's own blocks; None where none does, or the tensor is no matrix of them."""
        return None if self.order is None else KINDS.get(self.dtype)

    @property
    def has_floats(self) -> bool:
        """Whether the file holds floats, not blocks."""
        return self.dtype in FLOATS

    def levels(self) -> Iterator[Levels]:
        """What `BlockKind.levels` makes of the rows, some at a time."""
        from gguf.constants import GGML_QUANT_SIZES

        blocks = self.blocks
        assert blocks is not None  # callers have looked
        num_blocks = self.shape[1] // GGML_QUANT_SIZES[self.kind][0]
        for rows in self._rows():
            yield blocks.levels(rows.reshape(len(rows), num_blocks, -1))


def kinds_of(tensors: Mapping[str, StoredTensor], *, is_kept: bool) -> tuple[str, ...]:
    """The kinds of a GGUF file's matrices that a bundle can hold as they are; or of the others."""
    matrices = [tensor for tensor in tensors.values() if isinstance(tensor, GgufTensor) and len(tensor.shape) == 2]
    return tuple(sorted({matrix.dtype for matrix in matrices if _is_kept(matrix) == is_kept}))


def _is_kept(tensor: StoredTensor) -> bool:
    return isinstance(tensor, GgufTensor) and (tensor.has_floats or tensor.blocks is not None)


def bundle_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """What the tensors of a GGUF file take in a bundle that holds them as they are where it can."""
    return round(sum(tensor.size * _bits_of(tensor) / 8 for tensor in tensors.values()))


def _bits_of(tensor: StoredTensor) -> float:
    if not isinstance(tensor, GgufTensor) or tensor.has_floats or len(tensor.shape) != 2:
        return 32
    return _ROUNDED_BITS if tensor.blocks is None else tensor.blocks.bits_per_weight


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """A GGUF file's tensors by name: floats and, where a product can hold them, blocks stay as they are."""

    tensors: Mapping[str, StoredTensor]

    def form(self, key: str) -> str | None:
        """A word for how the weight `key` is held, which weights of one product share; None where it is rounded.

        A key that joins tensors ("q below k below v") has the form that all of them have.
        """
        forms = {self._form_of(name.removesuffix(TRANSPOSED)) for name in key.split(JOINED)}
        return forms.pop() if len(forms) == 1 else None

    def _form_of(self, name: str) -> str | None:
        tensor = self.tensors.get(name)
        if not isinstance(tensor, GgufTensor):
            return None
        if tensor.has_floats:
            return _FLOATS
        blocks = tensor.blocks
        return None if blocks is None else f"{blocks.bits} bits by {blocks.size}{', offset' * blocks.has_minima}"

    def has_floats(self, key: str) -> bool:
        """Whether the weight `key` is of floats, which no rounding need touch."""
        return self.form(key) == _FLOATS

    def of(self, key: str) -> "CarriedWeight | None":
        """The blocks of the weight `key`; None without."""
        tensors = [self.tensors.get(name) for name in key.split(JOINED)]
        if self.form(key) in (None, _FLOATS) or None in tensors:
            return None
        return CarriedWeight(tuple(tensor for tensor in tensors if isinstance(tensor, GgufTensor)))


@dataclass(frozen=True, slots=True)
class CarriedWeight:
    """Tensors of one form, row below row: a weight `[N, K]` in the file's blocks."""

    tensors: tuple[GgufTensor, ...]

    @property
    def blocks(self) -> BlockKind:
        """How a product holds them."""
        blocks = self.tensors[0].blocks
        assert blocks is not None  # `FileBlocks.of` has looked
        return blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all tensors, and weights of a row."""
        return sum(tensor.shape[0] for tensor in self.tensors), self.tensors[0].shape[1]

    def levels(self) -> Iterator[Levels]:
        """What `GgufTensor.levels` says of one tensor after the other."""
        return chain.from_iterable(tensor.levels() for tensor in self.tensors)
