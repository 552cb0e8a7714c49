"""The draft's key and value caches: one slot a token, in the host's memory or in a request's own tensors."""

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import DraftEntry


class SlotCache:
    """Key and value caches of all layers, `[1, kvh, C, hd]` each, key and value in turn.

    Attributes:
        kind: what they are kept in. numpy has no bf16: its numbers are moved about as float16, bit by bit.
    """

    def __init__(self, entry: DraftEntry, capacity: int, kind: ov.Type, owner: ov.InferRequest | None = None) -> None:
        """Make an empty cache: in the tensors of `owner`, a request of that capacity, or in ordinary memory.

        An NPU computes on its own requests' tensors; from ordinary memory it would copy the cache at every pass.
        """
        shape = (1, entry.shape.num_kv_heads, capacity, entry.shape.head_dim)
        layers = range(entry.shape.num_layers)
        self.capacity = capacity
        self.names = [name for layer in layers for name in (names.past_key(layer), names.past_value(layer))]
        self.kind = kind
        self.arrays: list[NDArray[np.floating]] = [np.zeros(shape, dtype=numpy_type(kind)) for _ in self.names]
        self.tensors = [tensor_on(array, kind) for array in self.arrays]
        if owner is not None:
            self.tensors = [owner.get_tensor(name) for name in self.names]
            self.arrays = [tensor.data for tensor in self.tensors]
            for array in self.arrays:
                array.fill(0)

    def take(self, other: "SlotCache") -> None:
        """Copy the slots of a larger or smaller cache, as far as both have them."""
        size = min(self.capacity, other.capacity)
        for source, destination in zip(other.arrays, self.arrays, strict=True):
            destination[:, :, :size] = source[:, :, :size]


def numpy_type(kind: ov.Type) -> np.dtype[Any]:
    """What numbers of `kind` are kept in: numpy has no bf16."""
    return np.dtype(np.float16 if kind == ov.Type.bf16 else kind.to_dtype())


def tensor_on(array: NDArray[Any], kind: ov.Type) -> ov.Tensor:
    """A tensor on the array's own memory."""
    return ov.Tensor(array, ov.Shape(array.shape), kind)
