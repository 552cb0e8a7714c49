"""The shared weights file: every tensor of every target stage, each distinct one once.

Owns: offsets and the external-data references of the stages. Does not own: which stages there are.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

import onnx_ir as ir

from mirrorsd.export.weights.lazy_weight import LazyWeight, lazy_weight

_INLINE_BYTES = 1024
_ALIGNMENT = 4096


class WeightsState(TypedDict):
    """A weights file at rest: its size, and where each tensor begins, by dtype and key."""

    size: int
    offsets: dict[str, int]


class WeightsFile:
    """Append tensors to one file while stages are written; equal tensors (by key) share their bytes."""

    def __init__(self, path: Path, state: WeightsState | None = None) -> None:
        """Create the file at `path`, or go on from `state`: whatever was written after it is cut off."""
        self._path = path
        self._stream = path.open("wb" if state is None else "r+b")
        self._offsets: dict[str, int] = dict(state["offsets"]) if state else {}
        self._stream.truncate(state["size"] if state else 0)
        self._stream.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def flushed(self) -> WeightsState:
        """Bring everything to disk; return the state that the file can go on from."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return {"size": self._stream.tell(), "offsets": dict(self._offsets)}

    def missing_bytes(self, models: Iterable[ir.Model]) -> int:
        """Bytes that moving the weights of `models` would add, without alignment; nothing is computed for it."""
        sizes = {
            _key(tensor): tensor.nbytes
            for model in models
            for value in model.graph.initializers.values()
            if (tensor := value.const_value) is not None and tensor.nbytes > _INLINE_BYTES
        }
        return sum(size for key, size in sizes.items() if key not in self._offsets)

    def move_weights(self, model: ir.Model) -> Iterator[int]:
        """Move the large initializers of `model` into the file; small ones stay inside the graph.

        Works while it is iterated over: gives how many bytes each tensor has added to the file.
        """
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= _INLINE_BYTES:
                continue
            start = self._stream.tell()
            value.const_value = self._store(lazy_weight(tensor))
            yield self._stream.tell() - start

    def _store(self, tensor: LazyWeight) -> ir.ExternalTensor:
        key = _key(tensor)
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


def _key(tensor: ir.TensorProtocol) -> str:
    return f"{tensor.dtype} {lazy_weight(tensor).key}"
