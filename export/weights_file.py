"""The shared weights file: every tensor of every target stage, each distinct content once.

Owns: offsets and the external-data references of the stages. Does not own: which stages there are.
"""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx_ir as ir

_INLINE_BYTES = 1024
_ALIGNMENT = 4096


class WeightsFile:
    """Append tensors to one file while stages are written; equal tensors share their bytes."""

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
            value.const_value = self._store(tensor)

    def _store(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        array = np.ascontiguousarray(tensor.numpy())
        content = array.reshape(-1).view(np.uint8).data
        key = (str(tensor.dtype), hashlib.sha256(content).hexdigest())
        if key not in self._offsets:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._offsets[key] = self._stream.tell()
            self._stream.write(content)
        return ir.ExternalTensor(
            self._path.name,
            self._offsets[key],
            array.nbytes,
            tensor.dtype,
            shape=ir.Shape(array.shape),
            name=tensor.name or "",
            base_dir=self._path.parent,
        )
