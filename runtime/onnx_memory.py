"""Where the target's tensors live on ONNX Runtime: in memory that the host sees, or on a device.

Owns: making tensors in one place or the other, writing small inputs in place, reading results. A tensor never moves, so
that what was bound or captured once stays true.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement

_ON_CUDA = ("CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider")
_ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A kind of memory, as ONNX Runtime names it; `is_device` where the host does not see it."""

    kind: str = "cpu"
    device_id: int = 0
    is_device: bool = False

    def tensor(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """A tensor of zeros; `dtype` is numpy's name, or `bfloat16`."""
        if self.is_device:
            kind = _ONNX_TYPES[dtype]
            return Tensor(ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, self.kind, self.device_id))
        host = np.zeros(shape, dtype=dtype)
        return Tensor(ort.OrtValue.ortvalue_from_numpy(host), host)

    def first_rows(self, whole: "Tensor", num_rows: int, session: ort.InferenceSession, output: str) -> "Tensor":
        """The first rows `[1, num_rows, ...]` of a tensor `[1, R, ...]`, on the same memory.

        On a device, only a binding can make one: of an output of `session` that has this shape and type.
        """
        if whole.host is not None:
            host = whole.host[:, :num_rows]
            return Tensor(ort.OrtValue.ortvalue_from_numpy(host), host)
        binding, value = session.io_binding(), whole.value
        shape = [1, num_rows, *value.shape()[2:]]
        binding.bind_output(output, self.kind, self.device_id, value.element_type(), shape, value.data_ptr())
        return Tensor(binding.get_outputs()[0], memory=whole)


def place_of(placement: TargetPlacement) -> Place:
    """Where hidden states, caches and logits of a placement live."""
    if placement.provider in _ON_CUDA:
        return Place(kind="cuda", device_id=placement.device_id, is_device=True)
    return Place()


class Tensor:
    """A tensor at a fixed address. On the host it is an array; on a device the host copies to and from it.

    Attributes:
        value: the tensor as ONNX Runtime takes it.
        host: the same memory as an array; None on a device.
    """

    def __init__(
        self, value: ort.OrtValue, host: NDArray[Any] | None = None, *, memory: "Tensor | None" = None
    ) -> None:
        """Take a value; `memory` is whose memory it is on, if not its own."""
        self.value, self.host = value, host
        self._memory = memory

    def write(self, array: NDArray[Any]) -> None:
        """Replace the contents; same shape and dtype."""
        if self.host is not None:
            self.host[...] = array
        else:
            self.value.update_inplace(array)

    def read(self) -> NDArray[Any]:
        """The contents on the host: a view there, a copy from a device."""
        return self.host if self.host is not None else self.value.numpy()


def host_scalar() -> tuple[NDArray[np.int32], ort.OrtValue]:
    """One number that providers read on the host even where everything else is on a device."""
    array = np.zeros((), dtype=np.int32)
    return array, ort.OrtValue.ortvalue_from_numpy(array)
