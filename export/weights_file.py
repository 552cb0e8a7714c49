"""The shared weights file: every tensor of every target stage, each distinct one once.

Owns: offsets and the external-data references of the stages. Does not own: which stages there are.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import onnx_ir as ir

from .lazy_weight import LazyWeight, lazy_weight

_INLINE_BYTES = 1024
_ALIGNMENT = 4096


class WeightsFile:
    """Append tensors to one file while stages are written; equal tensors (by key) share their bytes."""

    def __init__(self, path: Path) -> None:
        """Create the file at `path` (truncated where it exists)."""
        self._path = path
        self._stream = path.open("wb")
        self._offsets: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def move_weights(self, model: ir.Model) -> None:
        """Move the large initializers of `model` into the file; small ones stay inside the graph."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= _INLINE_BYTES:
                continue
            value.const_value = self._store(lazy_weight(tensor))

    def _store(self, tensor: LazyWeight) -> ir.ExternalTensor:
        key = (str(tensor.dtype), tensor.key)
        if key not in self._offsets:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._offsets[key] = self._stream.tell()
            tensor.tofile(self._stream)
        return ir.ExternalTensor(
            self._path.name,
            self._offsets[key],
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or "",
            base_dir=self._path.parent,
        )
