"""Tensors of a GGUF file: as floats, a few rows at a time, and as the blocks of integers that the file holds.

Owns: the bytes of three kinds of blocks (Q4_0, Q4_1, Q8_0); every other kind is undone by the `gguf` package. Does not
own: which tensor of Hugging Face's model is which of the file's (`checkpoints/gguf_file.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mirrorsd.export.weights.lazy_weight import JOINED
from mirrorsd.export.weights.stored_tensors import CHUNK_BYTES, StoredTensor

Array = npt.NDArray[Any]

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_FLOATS = ("F64", "F32", "F16", "BF16")
BLOCK = 32
_MIDDLE = 8


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
        step = max(1, CHUNK_BYTES // max(1, 4 * self.size // len(self.order)))
        for start in range(0, len(self.order), step):
            rows = np.ascontiguousarray(self.content[self.order[start : start + step]])
            yield torch.from_numpy(np.array(self._floats(rows), np.float32)).to(dtype)

    def _floats(self, rows: Array) -> Array:
        from gguf.quants import dequantize  # an optional package: other checkpoints do without it

        floats: Array = dequantize(rows, self.kind)
        return floats

    @property
    def is_carried(self) -> bool:
        """Whether a product can be computed with the file's own blocks."""
        return self.dtype in _BITS and self.order is not None

    def blocks(self) -> tuple[Array, ...]:
        """Levels uint8 `[n, B, 32]` (0..15 or 0..255), scales `[n, B]` and, of Q4_1, offsets `[n, B]`, in float32.

        A weight is `(level - middle) * scale`, and its block's offset. Q4_1 says `level * scale + minimum`, which is
        the same with `minimum + 8 * scale` as offset: a file's numbers have 11 bits, so the sum is exact. With the
        scale 0.5 and the minimum -3.75 the offset is 0.25, and level 7 stands for `(7 - 8) * 0.5 + 0.25 = -0.25`.
        """
        assert self.order is not None  # `is_carried` has looked
        rows = self.content[self.order]
        packed = rows.reshape(len(rows), self.shape[1] // BLOCK, -1)
        scales = _halves(packed[..., :2])
        if self.dtype == "Q8_0":
            return packed[..., 2:] ^ 0x80, scales
        numbers = packed[..., -BLOCK // 2 :]
        levels = np.concatenate((numbers & 15, numbers >> 4), axis=-1)
        if self.dtype == "Q4_0":
            return levels, scales
        return levels, scales, _halves(packed[..., 2:4]) + np.float32(_MIDDLE) * scales


def _halves(packed: Array) -> Array:
    """The 16-bit floats of `[n, B, 2]` bytes, as float32 `[n, B]`."""
    return np.ascontiguousarray(packed).view(np.float16)[..., 0].astype(np.float32)


def carried_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, GgufTensor]:
    """Those whose blocks a product can be computed with."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, GgufTensor) and tensor.is_carried}


def kinds_of(tensors: Mapping[str, StoredTensor], is_carried: tuple[bool, ...]) -> tuple[str, ...]:
    """The kinds of blocks in a GGUF file: those that can be carried (True), others (False); floats are no blocks."""
    found = [tensor for tensor in tensors.values() if isinstance(tensor, GgufTensor) and tensor.dtype not in _FLOATS]
    return tuple(sorted({tensor.dtype for tensor in found if tensor.is_carried in is_carried}))


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """The weights of a GGUF file whose blocks products are computed with, by name."""

    tensors: Mapping[str, GgufTensor]

    def kind(self, key: str) -> str | None:
        """The file's word for the blocks of the weight `key`; None where they are not carried."""
        weight = self.of(key)
        return None if weight is None else weight.tensors[0].dtype

    def of(self, key: str) -> "CarriedWeight | None":
        """The blocks of the weight `key`, which may join tensors of one kind ("q below k below v"); None without."""
        names = key.split(JOINED)
        if any(name not in self.tensors for name in names):
            return None
        return CarriedWeight(tuple(self.tensors[name] for name in names))


@dataclass(frozen=True, slots=True)
class CarriedWeight:
    """Tensors of one kind, row below row: a weight `[N, K]` in the file's blocks."""

    tensors: tuple[GgufTensor, ...]

    @property
    def bits(self) -> int:
        """Bits of an integer; a block has `BLOCK` of them."""
        return _BITS[self.tensors[0].dtype]

    @property
    def has_offsets(self) -> bool:
        """Whether each block has an offset beside its scale."""
        return self.tensors[0].dtype == "Q4_1"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all tensors, and weights of a row."""
        return sum(tensor.shape[0] for tensor in self.tensors), self.tensors[0].shape[1]

    def parts(self) -> tuple[Array, ...]:
        """What `GgufTensor.blocks` says of all rows."""
        return tuple(np.concatenate(parts) for parts in zip(*(t.blocks() for t in self.tensors), strict=True))
