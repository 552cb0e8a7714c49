"""Where the target's tensors live on ONNX Runtime: in memory that the host sees, or on a device.

Owns: making tensors in one place or the other, writing small inputs in place, reading results. A tensor never moves, so
that what was bound or captured once stays true.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import TargetEntry
from mirrorsd.runtime.backends.onnxruntime.device_memory import DeviceMemory
from mirrorsd.runtime.backends.onnxruntime.errors import ONNX_ERRORS
from mirrorsd.runtime.backends.onnxruntime.small_graphs import ONNX_TYPES

_ON_CUDA = ("CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider")
_DTYPES = {number: name for name, number in ONNX_TYPES.items()}
_NO_ROOM: tuple[type[Exception], ...] = (*ONNX_ERRORS, ValueError)
"""`ValueError` is numpy's word for more bytes than there are addresses."""
_BYTES = {"float32": 4, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A kind of memory, as ONNX Runtime names it; `is_device` where the host does not see it.

    Attributes:
        graphs: what reserves and reads memory that ONNX Runtime's own calls cannot; None where they can.
    """

    kind: str = "cpu"
    device_id: int = 0
    is_device: bool = False
    graphs: DeviceMemory | None = None

    @property
    def copies_when_bound(self) -> bool:
        """Whether messages stay on the host, so that binding one as an input is what copies it to the device."""
        return self.graphs is not None

    def message(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """A small tensor of zeros that the host writes before a pass, or reads after it."""
        return Place().tensor(shape, dtype) if self.copies_when_bound else self.tensor(shape, dtype)

    def tensor(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        """A tensor of zeros; `dtype` is numpy's name, or `bfloat16`.

        Raises:
            DeviceError: there is no room for it.
        """
        try:
            return self._new(shape, dtype)
        except _NO_ROOM as error:
            if dtype == "float16" and "requires f16" in str(error):
                raise DeviceError(
                    "This GPU, or its driver, has no 16-bit arithmetic. Export with --precision fp32, int8 or int4, or "
                    "choose another device map (`mirrorsd devices`)."
                ) from error
            raise DeviceError(
                f"No room for a tensor {list(shape)} of {dtype} ({prod(shape) * _BYTES[dtype] / 1e6:.0f} MB) in "
                f"{self.kind} memory: {str(error).strip()}. Close other sessions and programs, or export with a "
                "smaller --context."
            ) from error

    def first_rows(self, whole: "Tensor", num_rows: int, session: ort.InferenceSession, output: str) -> "Tensor":
        """The first rows `[1, num_rows, ...]` of a tensor `[1, R, ...]`, on the same memory.

        On a device, only a binding can make one: of an output of `session` that has this shape and type. Where graphs
        reserve memory it is another tensor.
        """
        if whole.host is not None:
            host = whole.host[:, :num_rows]
            return Tensor(ort.OrtValue.ortvalue_from_numpy(host), host)
        if self.graphs is not None:  # its operators refuse memory that they did not reserve themselves
            shape, dtype = whole.value.shape(), _DTYPES[whole.value.element_type()]
            return self.tensor((1, num_rows, *shape[2:]), dtype)
        binding, value = session.io_binding(), whole.value
        shape = [1, num_rows, *value.shape()[2:]]
        binding.bind_output(output, self.kind, self.device_id, value.element_type(), shape, value.data_ptr())
        return Tensor(binding.get_outputs()[0], memory=whole, graphs=self.graphs)

    def _new(self, shape: tuple[int, ...], dtype: str) -> "Tensor":
        if not self.is_device:
            host = np.zeros(shape, dtype=dtype)
            return Tensor(ort.OrtValue.ortvalue_from_numpy(host), host)
        if self.graphs is not None:
            return Tensor(self.graphs.zeros(shape, dtype), graphs=self.graphs)
        kind = ONNX_TYPES[dtype]
        tensor = Tensor(ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, self.kind, self.device_id))
        # A device's memory holds what was there before, in half precision easily NaN: kernels that multiply it with a
        # mask's zero would spread it.
        tensor.value.update_inplace(_zeros(shape, dtype))
        return tensor


def place_of(placement: TargetPlacement) -> Place:
    """Where hidden states, caches and logits of a placement live."""
    if placement.provider in _ON_CUDA:
        return Place(kind="cuda", device_id=placement.device_id, is_device=True)
    if placement.provider == "DmlExecutionProvider":
        return Place(kind="dml", device_id=placement.device_id, is_device=True)
    if placement.provider == "WebGpuExecutionProvider":
        # WebGPU knows one device: the one that the system prefers.
        return Place(kind="webgpu", is_device=True, graphs=DeviceMemory(placement, "webgpu"))
    return Place()


class Tensor:
    """A tensor at a fixed address. On the host it is an array; on a device the host copies to and from it.

    Attributes:
        value: the tensor as ONNX Runtime takes it.
        host: the same memory as an array; None on a device.
    """

    def __init__(
        self,
        value: ort.OrtValue,
        host: NDArray[Any] | None = None,
        *,
        memory: "Tensor | None" = None,
        graphs: DeviceMemory | None = None,
    ) -> None:
        """Take a value; `memory` is whose memory it is on, if not its own, `graphs` what reads it (see `Place`)."""
        self.value, self.host = value, host
        self._memory, self._graphs = memory, graphs

    def write(self, array: NDArray[Any]) -> None:
        """Replace the contents; same shape and dtype."""
        if self.host is not None:
            self.host[...] = array
        else:
            with raised_as(DeviceError, "ONNX Runtime failed while copying to the device", ONNX_ERRORS):
                self.value.update_inplace(array)

    def read(self) -> NDArray[Any]:
        """The contents on the host: a view there, a copy from a device."""
        if self.host is not None:
            return self.host
        with raised_as(DeviceError, "ONNX Runtime failed while copying from the device", ONNX_ERRORS):
            copied: NDArray[Any] = self._graphs.read(self.value) if self._graphs else self.value.numpy()
            return copied


def _zeros(shape: tuple[int, ...], dtype: str) -> NDArray[Any] | ort.OrtValue:
    if dtype == "bfloat16":  # a type that numpy does not have
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), ONNX_TYPES[dtype])
    return np.zeros(shape, dtype=dtype)


def host_scalar() -> tuple[NDArray[np.int32], ort.OrtValue]:
    """One number that providers read on the host even where everything else is on a device."""
    array = np.zeros((), dtype=np.int32)
    return array, ort.OrtValue.ortvalue_from_numpy(array)


def make_cache(entry: TargetEntry, place: Place) -> dict[str, ort.OrtValue]:
    """Share-buffer caches: `past_*` and `present_*` of a layer are one value of `capacity` rows."""
    shape = (1, entry.shape.num_kv_heads, entry.capacity, entry.shape.head_dim)
    cache: dict[str, ort.OrtValue] = {}
    for layer in range(entry.shape.num_layers):
        key, value = (place.tensor(shape, entry.shape.dtype).value for _ in range(2))
        cache[names.past_key(layer)] = cache[names.present_key(layer)] = key
        cache[names.past_value(layer)] = cache[names.present_value(layer)] = value
    return cache
