"""Weights of graphs that are computed only while they are written, a few rows at a time.

Owns: lazy tensors for `onnx_ir`, transposing, joining and packing (quantising) them without holding them.
Does not own: where a checkpoint's numbers lie (`stored_tensors.py`), how numbers are packed (`quantise.py`),
the file they are written to (`weights_file.py`).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from mirrorsd.export.weights.rotation import rotate
from mirrorsd.export.weights.stored_tensors import StoredTensor

Array = npt.NDArray[Any]
Chunks = Callable[[], Iterator[Array]]
Pack = Callable[[Array], tuple[Array, ...]]

STRIP_BYTES = 256 << 20
TRANSPOSED, JOINED = " transposed", " below "
"""What keys say of matrices that were turned, and of tensors below one another."""
HASHED = "sha256:"
"""What keys of tensors begin with that no checkpoint has a name for."""


def first_name(key: str) -> str:
    """The name of the tensor that a weight's key begins with: of "q below k below v" that is "q"."""
    return key.split(JOINED)[0].removesuffix(TRANSPOSED)


class LazyWeight(ir.LazyTensor):
    """A tensor known by name, dtype and shape; its numbers exist only while `chunks` runs.

    `key` says how the numbers come about ("lm_head.weight", "lm_head.weight transposed"): two weights of one export
    with equal keys and dtypes are equal, which is known without computing either.
    """

    __slots__ = ("_chunks", "_origin", "key")

    def __init__(self, key: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: Chunks) -> None:
        """Describe a tensor; `chunks()` gives its rows in order, each chunk of any shape that has them."""
        super().__init__(self._whole, dtype=dtype, shape=ir.Shape(shape), name=key)
        self.key = key
        self._chunks = chunks
        self._origin: LazyWeight | None = None

    def chunks(self) -> Iterator[Array]:
        """Compute the tensor, some of its rows at a time; the arrays' bytes in order are the tensor's."""
        return self._chunks()

    def tofile(self, file: Any) -> None:
        """Write the bytes to a binary stream without ever holding all of them."""
        for chunk in self.chunks():
            file.write(_bytes_of(chunk))

    def _whole(self) -> ir.Tensor[Array]:
        whole: Array = np.empty(self.shape.numpy(), self.dtype.numpy())
        flat, start = whole.reshape(-1), 0
        for chunk in self.chunks():
            flat[start : start + chunk.size] = chunk.reshape(-1)
            start += chunk.size
        return ir.Tensor(whole, self.dtype)

    def transposed(self) -> "LazyWeight":
        """The transposed matrix; transposing twice gives back the first one."""
        if self._origin is not None:
            return self._origin
        num_rows, width = self.shape.numpy()
        turned = LazyWeight(f"{self.key}{TRANSPOSED}", self.dtype, (width, num_rows), self._columns)
        turned._origin = self
        return turned

    def first_rows(self, count: int) -> "LazyWeight":
        """The matrix's first `count` rows; all of them where there are no more."""
        num_rows, width = (int(size) for size in self.shape.numpy())
        if count >= num_rows:
            return self

        def chunks() -> Iterator[Array]:
            left = count
            for chunk in self.chunks():
                rows = chunk.reshape(-1, width)[:left]
                yield rows
                left -= len(rows)
                if not left:
                    return

        return LazyWeight(f"{self.key} to {count}", self.dtype, (count, width), chunks)

    def times_columns(self, factors: npt.NDArray[np.float32], word: str) -> "LazyWeight":
        """The matrix `[N, K]` with its columns multiplied by `factors` `[K]`, which `word` tells from all others."""

        def chunks() -> Iterator[Array]:
            return ((rows * factors).astype(rows.dtype, copy=False) for rows in self.chunks())

        return LazyWeight(f"{self.key}{word}", self.dtype, tuple(self.shape.numpy()), chunks)

    def rotated(self) -> "LazyWeight":
        """The matrix `[N, K]` with its columns rotated into each other (`rotation.py`)."""

        def chunks() -> Iterator[Array]:
            return (rotate(rows).astype(rows.dtype, copy=False) for rows in self.chunks())

        return LazyWeight(f"{self.key} rotated", self.dtype, tuple(self.shape.numpy()), chunks)

    def _columns(self) -> Iterator[Array]:
        """Give strips of columns as rows; most matrices are one strip, so they are read once."""
        num_rows, width = (int(size) for size in self.shape.numpy())
        step = max(1, STRIP_BYTES // max(1, num_rows * self.dtype.numpy().itemsize))
        for first in range(0, width, step):
            strips = [chunk[:, first : first + step] for chunk in self.chunks()]
            yield np.ascontiguousarray(np.concatenate(strips).T)


def stored_weight(stored: StoredTensor, dtype: torch.dtype) -> LazyWeight:
    """A tensor of a checkpoint, converted to `dtype`."""

    def chunks() -> Iterator[Array]:
        return map(_as_array, stored.chunks(dtype))

    return LazyWeight(stored.name, _ir_dtype(dtype), stored.shape, chunks)


def lazy_weight(tensor: ir.TensorProtocol) -> LazyWeight:
    """`tensor` itself if it is lazy, else a lazy one around its numbers, known by their hash."""
    if isinstance(tensor, LazyWeight):
        return tensor
    array = np.ascontiguousarray(tensor.numpy())
    key = f"{HASHED}{hashlib.sha256(_bytes_of(array)).hexdigest()}"
    return LazyWeight(key, tensor.dtype, array.shape, lambda: iter((array,)))


def joined_rows(parts: Sequence[LazyWeight]) -> LazyWeight:
    """Tensors of one dtype below one another: `[3, K]` and `[2, K]` give `[5, K]`, `[3]` and `[2]` give `[5]`."""
    shapes = [part.shape.numpy() for part in parts]
    shape = (sum(int(sizes[0]) for sizes in shapes), *shapes[0][1:])
    key = JOINED.join(part.key for part in parts)
    return LazyWeight(key, parts[0].dtype, shape, lambda: chain.from_iterable(part.chunks() for part in parts))


def pack_rows(source: LazyWeight, recipe: str, pack: Pack, shapes: tuple[tuple[int, ...], ...]) -> list[LazyWeight]:
    """Describe the tensors that `pack` makes of `source`, whose rows it must treat one by one.

    Args:
        source: A matrix `[N, K]`.
        recipe: Names what `pack` does; equal recipes on equal sources give equal tensors.
        pack: Turns rows `[n, K]` into one array per tensor, each with `n` rows.
        shapes: The tensors' shapes; each holds the numbers of N packed rows.
    """
    width = int(source.shape.numpy()[1])
    row: Array = np.zeros((1, width), source.dtype.numpy())
    dtypes = [ir.DataType.from_numpy(example.dtype) for example in pack(row)]
    return packed_parts(f"{source.key} {recipe}", lambda: map(pack, source.chunks()), dtypes, shapes)


def packed_parts(
    key: str,
    chunks: Callable[[], Iterator[tuple[Array, ...]]],
    dtypes: Sequence[ir.DataType],
    shapes: Sequence[tuple[int, ...]],
) -> list[LazyWeight]:
    """Describe tensors that come about together: `chunks()` gives some rows of each at a time.

    The first tensor is the large one: once it has been written, the others are known and kept until they are, too.
    """
    packing = _Packing(chunks)
    return [
        LazyWeight(f"{key}.{number}", dtype, shape, packing.part(number))
        for number, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ]


@dataclass(slots=True)
class _Packing:
    """One weight's packing; `held` keeps the small tensors between the large one's writing and theirs."""

    chunks: Callable[[], Iterator[tuple[Array, ...]]]
    held: dict[int, list[Array]] = field(default_factory=dict)

    def part(self, number: int) -> Chunks:
        """Chunks of tensor `number`."""
        return self._first if number == 0 else lambda: self._other(number)

    def _first(self) -> Iterator[Array]:
        held: dict[int, list[Array]] = {}
        for first, *others in self.chunks():
            for number, other in enumerate(others, start=1):
                held.setdefault(number, []).append(other)
            yield first
        self.held = held

    def _other(self, number: int) -> Iterator[Array]:
        if number in self.held:
            return iter(self.held.pop(number))
        return (parts[number] for parts in self.chunks())


def _as_array(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ir.DataType.BFLOAT16.numpy())
    array: Array = tensor.numpy()
    return array


def _ir_dtype(dtype: torch.dtype) -> ir.DataType:
    return ir.DataType.from_numpy(_as_array(torch.empty(0, dtype=dtype)).dtype)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
