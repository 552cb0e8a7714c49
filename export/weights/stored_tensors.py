"""Tensors in safetensors files: where each one lies, and reading some rows of it.

Owns: headers and bytes of *.safetensors. Nothing is mapped into memory, so what was read and dropped takes none.
Does not own: which files belong to a checkpoint (`checkpoint.py`), what the tensors are for (`weightless.py`).
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mirrorsd.graphs.documents import DocumentError, build, parse_json
from mirrorsd.graphs.errors import ExportError

CHUNK_BYTES = 32 << 20
_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Of a number of each dtype that safetensors has."""
_MOST_HEADER_BYTES = 100_000_000
"""By the format's own rule."""


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

    def check_readable(self) -> None:
        """Check that it holds floats that can be read.

        Raises:
            ExportError: it does not.
        """
        if self.dtype not in _TORCH_DTYPES:
            raise ExportError(
                f"{self.path}: {self.name!r} has dtype {self.dtype}; supported are {', '.join(_TORCH_DTYPES)}: save "
                "the model in one of them"
            )

    def read(self, dtype: torch.dtype) -> Tensor:
        """Read all of it as `dtype`, converting a few rows at a time."""
        whole = torch.empty(self.shape, dtype=dtype)
        num_rows = self.shape[0] if self.shape else 1
        rows = whole.reshape(num_rows, self.size // max(num_rows, 1))
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
        self.check_readable()
        stored = _TORCH_DTYPES[self.dtype]
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one safetensors file by name, checking that the file is whole.

    Raises:
        ExportError: the header is unreadable, tensors overlap, leave gaps or have another size than their shape asks
            for, or the file is shorter or longer than its header says.
    """
    try:
        entries, first, size = _read_entries(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from error
    last = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != first + last:
        state = "truncated" if size < first + last else "damaged"
        raise ExportError(f"{path} is {state}: {size} bytes, its header says {first + last}. Download it again")
    _check_places(path, entries)
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path} is damaged: safetensors does not open it ({error}). Download it again") from error
    return {
        name: StoredTensor(
            path=path, name=name, dtype=entry.dtype, shape=entry.shape, offset=first + entry.data_offsets[0]
        )
        for name, entry in entries.items()
    }


def _read_entries(path: Path) -> tuple[dict[str, _Entry], int, int]:
    """The header's entries by tensor, where the first tensor begins, and the file's size, both in bytes."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes + 8 > size:
            raise ExportError(
                f"{path} is truncated: {size} bytes cannot hold its header of {header_bytes}. Download it again"
            )
        if header_bytes > _MOST_HEADER_BYTES:
            raise ExportError(
                f"{path} is damaged: a header of {header_bytes} bytes, the format allows {_MOST_HEADER_BYTES}. "
                "Download it again"
            )
        raw = stream.read(header_bytes)
    try:
        header = parse_json(raw.decode("utf-8"), names_once=True)
    except (DocumentError, UnicodeDecodeError) as error:
        raise ExportError(
            f"{path} is damaged: its header is not JSON that can be read ({error}). Download it again"
        ) from error
    if not isinstance(header, dict):
        raise ExportError(f"{path} is damaged: its header is no table of tensors. Download it again")
    entries = {name: _entry(path, name, given) for name, given in header.items() if name != "__metadata__"}
    return entries, 8 + header_bytes, size


def _entry(path: Path, name: str, given: object) -> _Entry:
    """Read what the header says of the tensor `name`.

    Raises:
        ExportError: it is of another form, or its bytes are not as many as its shape and dtype ask for.
    """
    try:
        entry = build(_Entry, given, allows_unknown=True)
    except DocumentError as error:
        raise ExportError(f"{path} is damaged: the header's {name!r} {error}. Download it again") from error
    start, end = entry.data_offsets
    bits = BITS.get(entry.dtype)
    if bits is None:
        raise ExportError(
            f"{path} is damaged: the header's {name!r} has {entry.dtype!r} as 'dtype'; expected one of "
            f"{', '.join(BITS)}. Download it again"
        )
    if min(entry.shape, default=0) < 0 or not 0 <= start <= end:
        raise ExportError(
            f"{path} is damaged: the header's {name!r} has shape {list(entry.shape)} and data_offsets [{start}, {end}];"
            " expected no negative numbers. Download it again"
        )
    expected = math.prod(entry.shape) * bits / 8
    if end - start != expected:
        raise ExportError(
            f"{path} is damaged: the header's {name!r} has data_offsets [{start}, {end}], {end - start} bytes; its "
            f"shape {list(entry.shape)} of {entry.dtype} asks for {expected:.0f}. Download it again"
        )
    return entry


def _check_places(path: Path, entries: Mapping[str, _Entry]) -> None:
    """Check that each tensor begins where the one before it ends.

    Raises:
        ExportError: two overlap, or bytes between two belong to none.
    """
    before, end = "the header", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start = entry.data_offsets[0]
        if start != end:
            flaw = "overlaps" if start < end else "leaves a gap behind"
            raise ExportError(
                f"{path} is damaged: {name!r} begins at byte {start} of the data and {flaw} {before}, which ends at "
                f"{end}. Download it again"
            )
        before, end = repr(name), entry.data_offsets[1]
