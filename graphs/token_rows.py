"""Rows of a token embedding, read from where it lies in a bundle.

A draft that shares its target's embedding has none of its own: the host looks its tokens up here, so that the bundle,
and the memory, hold them once.

Owns: the numbers of a table. Does not own: where it lies (`manifest.TokenTable`), what is done with the rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import TokenTable

_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
_BYTES: np.dtype[Any] = np.dtype(np.uint8)


class TokenRows:
    """A table's rows by token; the file is mapped, not read."""

    def __init__(self, bundle: Path, table: TokenTable) -> None:
        """Map the table.

        Raises:
            BundleError: the file cannot be read.
        """
        self._table = table
        try:
            self._file = np.memmap(bundle / table.file, np.uint8, mode="r")
        except OSError as error:
            raise BundleError(f"{bundle / table.file} cannot be read: {error}. Copy the bundle again.") from error
        numbers = _STORED[table.dtype]
        if table.bits:
            self._rows = self._part(table.offset, _BYTES, table.num_blocks * table.block_size * table.bits // 8)
            self._scales = self._part(table.scales_offset, numbers, table.num_blocks)
            if table.factors_offset is not None:
                end = table.factors_offset + table.width * 4
                self._rows = self._rows.view(np.int8)
                self._factors: NDArray[np.float32] = self._file[table.factors_offset : end].view("<f4")
        else:
            self._rows = self._part(table.offset, numbers, table.width)

    def _part(self, offset: int, dtype: np.dtype[Any], width: int) -> NDArray[Any]:
        num_bytes = self._table.num_rows * width * dtype.itemsize
        return self._file[offset : offset + num_bytes].view(dtype).reshape(self._table.num_rows, width)

    def __call__(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows `[N, width]` of `ids` `[N]`, each at least 0 and below `num_rows`."""
        table, index = self._table, np.asarray(ids, np.int64)
        found = self._rows[index]
        if not table.bits:
            return _as_floats(found)
        if table.factors_offset is not None:
            signed: NDArray[np.float32] = found.astype(np.float32) * self._scales[index] * self._factors
            return signed
        if table.bits == 4:
            found = np.stack((found & 15, found >> 4), axis=-1)
        levels = found.reshape(len(index), table.num_blocks, table.block_size).astype(np.float32) - (
            1 << (table.bits - 1)
        )
        rows = levels * _as_floats(self._scales[index])[..., None]
        return rows.reshape(len(index), table.num_blocks * table.block_size)[:, : table.width]


def _as_floats(numbers: NDArray[Any]) -> NDArray[np.float32]:
    if numbers.dtype == _STORED["bfloat16"]:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
