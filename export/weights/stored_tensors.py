"""Tensors in safetensors files: where each one lies, and reading some rows of it.

Owns: headers and bytes of *.safetensors. Nothing is mapped into memory, so what was read and dropped takes none.
Does not own: which files belong to a checkpoint (`checkpoint.py`), what the tensors are for (`weightless.py`).
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirrorsd.graphs.errors import ExportError

CHUNK_BYTES = 32 << 20
_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: `offset` is where its first byte lies, `dtype` the name that safetensors gives it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read all of it as `dtype`, converting a few rows at a time."""
        whole = torch.empty(self.shape, dtype=dtype)
        rows = whole.reshape(self.shape[0] if self.shape else 1, -1)
        start = 0
        for chunk in self.chunks(dtype):
            rows[start : start + len(chunk)] = chunk.reshape(len(chunk), -1)
            start += len(chunk)
        return whole

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read it in order, some rows `[n, ...]` at a time, as `dtype`; a scalar is one row.

        Raises:
            ExportError: it is no floating-point tensor, or the file has become shorter.
        """
        stored = _TORCH_DTYPES.get(self.dtype)
        if stored is None:
            raise ExportError(
                f"{self.path}: {self.name!r} has dtype {self.dtype}; supported are {', '.join(_TORCH_DTYPES)}"
            )
        num_rows = self.shape[0] if self.shape else 1
        width = self.size // max(num_rows, 1)
        step = max(1, CHUNK_BYTES // max(1, 4 * width))
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            for start in range(0, num_rows, step):
                shape = (min(step, num_rows - start), *self.shape[1:])
                yield self._next(stream, math.prod(shape), stored).reshape(shape).to(dtype)

    def _next(self, stream: Any, count: int, stored: torch.dtype) -> Tensor:
        raw = np.fromfile(stream, np.uint8, count * stored.itemsize)
        if raw.size != count * stored.itemsize:
            raise ExportError(f"{self.path} ended while {self.name!r} was read: it was changed during the export")
        return torch.from_numpy(raw).view(stored)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one safetensors file by name, checking that the file is whole.

    Raises:
        ExportError: the header is unreadable or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes + 8 > size:
            raise ExportError(f"{path} is truncated: {size} bytes cannot hold its header. Download it again")
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise ExportError(f"{path} is damaged: its header is not JSON. Download it again") from error
    header.pop("__metadata__", None)
    first = 8 + header_bytes
    expected = first + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        state = "truncated" if size < expected else "damaged"
        raise ExportError(f"{path} is {state}: {size} bytes, its header says {expected}. Download it again")
    return {
        name: StoredTensor(
            path=path,
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=first + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
