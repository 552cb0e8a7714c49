"""A stage of the target, and the tensors that it reads and writes.

A tensor lives in memory that the host sees, or on a device, and never moves: what was bound or captured once stays
true. Owns: making tensors, writing small inputs in place, reading results; running one stage. Does not own: opening
stages and where their tensors live (`device`), what a pass binds and in which order it runs (`bound_pass`).
"""

import mmap
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.device_memory import DeviceMemory
from mirrorsd.devices.onnxruntime.masked_graph import MASK, TABLE_ROWS, RowLayout
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS, why_failed
from mirrorsd.graphs.errors import DeviceError, raised_as

_GRAPH_KEY, _NO_GRAPH = "gpu_graph_id", "-1"
_DTYPES = {number: name for name, number in ONNX_TYPES.items()}
_LEAST_MAPPED_BYTES = 1 << 20
"""Memory of the host is asked from the system itself from so many bytes on: caches, which most texts do not fill."""
_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""Of this process alone: the system's own choice would be shared with processes that it starts."""
_NO_ROOM: tuple[type[Exception], ...] = (*ONNX_ERRORS, ValueError, OSError, OverflowError)
"""The last three are numpy's and the system's words for more bytes than there are."""
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
            host = _host_zeros(shape, dtype)
            return Tensor(ort.OrtValue.ortvalue_from_numpy(host), host)
        if self.graphs is not None:
            return Tensor(self.graphs.zeros(shape, dtype), graphs=self.graphs)
        kind = ONNX_TYPES[dtype]
        tensor = Tensor(ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, self.kind, self.device_id))
        # A device's memory holds what was there before, in half precision easily NaN: kernels that multiply it with a
        # mask's zero would spread it.
        tensor.value.update_inplace(_zeros(shape, dtype))
        return tensor


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


def _host_zeros(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Zeros that take no memory until they are written; memory that was used before would be cleared, and so taken."""
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _LEAST_MAPPED_BYTES:
        return np.zeros(shape, dtype=dtype)
    return np.frombuffer(mmap.mmap(-1, num_bytes, **_PRIVATE), dtype).reshape(shape)


def _zeros(shape: tuple[int, ...], dtype: str) -> NDArray[Any] | ort.OrtValue:
    if dtype == "bfloat16":  # a type that numpy does not have
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), ONNX_TYPES[dtype])
    return np.zeros(shape, dtype=dtype)


def host_scalar() -> tuple[NDArray[np.int32], ort.OrtValue]:
    """One number that providers read on the host even where everything else is on a device."""
    array = np.zeros((), dtype=np.int32)
    return array, ort.OrtValue.ortvalue_from_numpy(array)


class OnnxStage:
    """An opened stage.

    Attributes:
        nodes: how many of which operator the device runs: `(provider, operator) -> count`.
        is_queued: whether `run` leaves the work in the device's queue, and `wait` is when it is done.
    """

    def __init__(
        self, session: ort.InferenceSession, path: Path, nodes: Counter[tuple[str, str]], *, is_queued: bool = False
    ) -> None:
        self.session, self.path, self.name, self.nodes, self.is_queued = session, path, path.stem, nodes, is_queued

    def run(self, binding: ort.IOBinding, options: ort.RunOptions | None = None) -> None:
        """Run what is bound.

        Raises:
            DeviceError: the device failed.
        """
        self._do(self.session.run_with_iobinding, binding, options)

    def wait(self, binding: ort.IOBinding) -> None:
        """Wait until what was run last is done.

        Raises:
            DeviceError: the device failed.
        """
        self._do(binding.synchronize_outputs)

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except ONNX_ERRORS as error:
            words = f"ONNX Runtime failed while running the target's {self.name}: {why_failed(error)}"
            raise DeviceError(words) from error

    def release(self, graph: int | None) -> None:
        """Forget a captured graph, whose addresses are about to become invalid."""
        if graph is not None:
            with raised_as(DeviceError, f"ONNX Runtime could not release a pass of {self.name}", ONNX_ERRORS):
                self.session.release_captured_graph(graph)


def run_options(graph: int | None, *, has_queue: bool) -> ort.RunOptions:
    """Options of a pass: which captured graph it is, if any, and the flag that ends it early.

    Where the device `has_queue` of ours, nothing waits at the end of a run.

    The graph is named on every device: ONNX Runtime's Python looks it up in every run, and where it is not set, it
    catches an error (50 us each; twice that is 7 % of the storyteller's token).
    """
    options = ort.RunOptions()
    if has_queue:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry(_GRAPH_KEY, _NO_GRAPH if graph is None else str(graph))
    return options


class PassMask:
    """The inputs of a pass's masked stages, of which the mask is as wide as the cache is long by then.

    A captured pass has the whole cache's length and fixed addresses; else the mask is another tensor in every pass.
    """

    def __init__(self, place: Place, count: int, dtype: str, capacity: int, fixed_columns: int | None) -> None:
        """Make those of `count` rows, spare ones included, beside a cache of `capacity`."""
        self._count, self._dtype, self._capacity = count, dtype, capacity
        self._table_rows = place.message((capacity,), "int64")
        self._fixed = place.message((1, 1, count, fixed_columns), dtype) if fixed_columns else None

    @property
    def values(self) -> dict[str, ort.OrtValue]:
        """What is bound first."""
        mask = (
            self._fixed.value if self._fixed is not None else self._value(RowLayout(self._count, 0, None), self._count)
        )
        return {TABLE_ROWS: self._table_rows.value, MASK: mask}

    def write(self, start: int, parents: Sequence[int] | None, num_columns: int) -> dict[str, ort.OrtValue]:
        """Set them for rows from `start` on; what has to be bound again."""
        layout = RowLayout(self._count, start, parents)
        self._table_rows.write(layout.table_rows(self._capacity))
        if self._fixed is None:
            return {MASK: self._value(layout, num_columns)}
        self._fixed.write(layout.mask(self._dtype, self._fixed.value.shape()[3]))
        return {}

    def _value(self, layout: RowLayout, num_columns: int) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(layout.mask(self._dtype, num_columns))


class RowBuffers:
    """What a session's passes write to, by stage and output: few rows are the first of many.

    So nothing of a pass may be read after the next one has begun.
    """

    def __init__(self, place: Place, least_rows: int) -> None:
        """Each has `least_rows` at least: memory of the host that no pass has touched takes no room."""
        self._place, self._least_rows = place, least_rows
        self._whole: dict[tuple[str, str], Tensor] = {}

    def rows(self, stage: OnnxStage, output: str, shape: tuple[int, int, int], dtype: str) -> Tensor:
        """Memory for an output `[1, rows, width]`."""
        key, (_, num_rows, width) = (stage.name, output), shape
        if key not in self._whole or self._whole[key].value.shape()[1] < num_rows:
            size = max(self._least_rows, 1 << (num_rows - 1).bit_length())
            self._whole[key] = self._place.tensor((1, size, width), dtype)
        return self._place.first_rows(self._whole[key], num_rows, stage.session, output)

    def clear(self) -> None:
        """Let go of them."""
        self._whole.clear()
