"""One pass of the target: its stages, bound for one number of rows to tensors at fixed addresses.

A tensor lives in memory that the host sees, or on a device, and never moves: what was bound or captured once stays
true. Owns: making tensors, writing small inputs in place, reading results; running, the bindings and their order. Does
not own: opening stages and where their tensors live (`device`), which passes a session keeps (`target`).
"""

import mmap
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Exit, Segment
from mirrorsd.runtime.backends.onnxruntime.device_memory import DeviceMemory
from mirrorsd.runtime.backends.onnxruntime.errors import ONNX_ERRORS, why_failed
from mirrorsd.runtime.backends.onnxruntime.small_graphs import ONNX_TYPES
from mirrorsd.runtime.backends.protocol import TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

if TYPE_CHECKING:
    from mirrorsd.runtime.backends.onnxruntime.device import OnnxDevice
    from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel, RowBuffers

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


def run_options(device: "OnnxDevice", graph: int | None) -> ort.RunOptions:
    """Options of a pass: which captured graph it is, if any, and the flag that ends it early.

    The graph is named on every device: ONNX Runtime's Python looks it up in every run, and where it is not set, it
    catches an error (50 us each; twice that is 7 % of the storyteller's token).
    """
    options = ort.RunOptions()
    if device.stream is not None:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry(_GRAPH_KEY, _NO_GRAPH if graph is None else str(graph))
    return options


class BoundPass:
    """All stages bound for one number of rows; captured as graphs where the device does that, prefill never."""

    def __init__(
        self,
        model: "OnnxTargetModel",
        cache: dict[str, ort.OrtValue],
        buffers: "RowBuffers",
        num_rows: int,
        *,
        logit_rows: int,
    ) -> None:
        shape, place = model.entry.shape, model.device.place
        self._ids = place.message((1, num_rows), "int64")
        self._seqlens_k = place.message((1,), "int32")
        self._last_row = np.zeros(1, dtype=np.int32)
        self._total_length, total_length = host_scalar()
        rows = place.message((logit_rows,), "int64")
        rows.write(np.arange(num_rows - logit_rows, num_rows))
        self._argmax_ids = place.message((1, logit_rows), "int64")
        self._argmax_gap = place.message((1, logit_rows), "float32")
        last_stage = model.segments[-1][1]
        logits_shape = (1, logit_rows, shape.vocab_size)
        self._logits = buffers.rows(last_stage, names.LOGITS, logits_shape, shape.logits_dtype)
        self._best, self._logits_dtype = model.device.best_logits, shape.logits_dtype
        captures = model.device.captures and logit_rows == num_rows
        self._graph = model.device.next_graph() if captures else None
        # A captured graph keeps the length it was captured with: the whole capacity holds for every pass.
        self._fixed_length = model.entry.capacity if captures else None
        self._spare_rows = model.entry.spare_rows
        values = {
            names.INPUT_IDS: self._ids.value,
            names.SEQLENS_K: self._seqlens_k.value,
            names.TOTAL_LENGTH: total_length,
            names.LOGIT_ROWS: rows.value,
            names.LOGITS: self._logits.value,
            names.ARGMAX_IDS: self._argmax_ids.value,
            names.ARGMAX_GAP: self._argmax_gap.value,
            **cache,
        }
        self._bind(model, values, buffers, num_rows)

    def _bind(
        self, model: "OnnxTargetModel", values: dict[str, ort.OrtValue], buffers: "RowBuffers", num_rows: int
    ) -> None:
        shape, place = model.entry.shape, model.device.place
        self.options = options = run_options(model.device, self._graph)
        self.segments: list[BoundSegment] = []
        self.exits: dict[int, _BoundExit] = {}
        self.taps: dict[int, Tensor] = {}
        hidden: Tensor | None = None
        for segment, stage in model.segments:
            if hidden is not None:
                values[names.HIDDEN] = hidden.value
            output = names.HIDDEN if hidden is None else names.NEXT_HIDDEN
            hidden = None
            if segment is not model.segments[-1][0]:
                hidden = buffers.rows(stage, output, (1, num_rows, shape.hidden_size), shape.dtype)
                values[names.NEXT_HIDDEN] = hidden.value
            for layer in segment.taps:
                size = (1, num_rows, shape.hidden_size)
                tap = hidden if layer == segment.end_layer else None
                tap = tap or buffers.rows(stage, names.tap(layer), size, shape.dtype)
                self.taps[layer], values[names.tap(layer)] = tap, tap.value
            bound = BoundSegment(segment, stage, options, values, hidden)
            if place.copies_when_bound:
                bound.copy_messages({name: value for name, value in values.items() if value.device_name() == "cpu"})
            self.segments.append(bound)
            if hidden is not None and segment.end_layer in model.exits:
                entry, exit_stage = model.exits[segment.end_layer]
                self.exits[segment.end_layer] = _BoundExit(entry, exit_stage, options, place, hidden.value)

    def write(self, tokens: NDArray[np.int64], start: int) -> None:
        """Set this pass's rows and how many cache rows there are after it."""
        total = start + len(tokens) + self._spare_rows
        self._ids.write(tokens[None])
        self._last_row[0] = total - 1
        self._seqlens_k.write(self._last_row)
        self._total_length[()] = self._fixed_length or total

    def read(self, num_rows: int, *, with_logits: bool | ShortlistFilter) -> TargetOutput:
        """The answer of the first `num_rows`; logits are copied from a device only if they are wanted.

        Where all that a filter keeps is among the best, these alone are.
        """
        ids, gaps = self._argmax_ids.read()[0, :num_rows], self._argmax_gap.read()[0, :num_rows]
        if isinstance(with_logits, ShortlistFilter) and self._best is not None:
            short_rows = self._best.read(self._logits.value, self._logits_dtype, with_logits, num_rows)
            if short_rows is not None:
                return TargetOutput(ids, gaps, None, short_rows)
        return TargetOutput(ids, gaps, self._logits.read()[0, :num_rows] if with_logits else None)

    def release(self) -> None:
        """Forget the captured graphs, before what they point at goes."""
        for stage in (*(bound.stage for bound in self.segments), *(bound.stage for bound in self.exits.values())):
            stage.release(self._graph)


class BoundSegment:
    """One segment's stage with everything bound."""

    def __init__(
        self,
        segment: Segment,
        stage: OnnxStage,
        options: ort.RunOptions,
        values: dict[str, ort.OrtValue],
        hidden: Tensor | None,
    ) -> None:
        self.name, self.end_layer, self.stage, self.hidden = segment.name, segment.end_layer, stage, hidden
        self._options, self._binding = options, stage.session.io_binding()
        self._messages: dict[str, ort.OrtValue] = {}
        for spec in stage.session.get_inputs():
            self._binding.bind_ortvalue_input(spec.name, values[spec.name])
        for spec in stage.session.get_outputs():
            name = names.NEXT_HIDDEN if spec.name == names.HIDDEN else spec.name
            self._binding.bind_ortvalue_output(spec.name, values[name])

    def copy_messages(self, values: dict[str, ort.OrtValue]) -> None:
        """Bind those inputs again before every run: that is what copies them from the host."""
        self._messages = {
            spec.name: values[spec.name] for spec in self.stage.session.get_inputs() if spec.name in values
        }

    def start(self) -> None:
        """Have the device begin, where it takes work without waiting for it."""
        if self.stage.is_queued:
            self.stage.run(self._binding, self._options)

    def finish(self, *, is_needed: bool) -> None:
        """Compute, or wait for what has started if it is needed now."""
        if self.stage.is_queued:
            if is_needed:
                self.stage.wait(self._binding)
            return
        if self._messages:
            with raised_as(DeviceError, f"ONNX Runtime could not copy the inputs of {self.name}", ONNX_ERRORS):
                for name, value in self._messages.items():
                    self._binding.bind_ortvalue_input(name, value)
        self.stage.run(self._binding, self._options)


class _BoundExit:
    """One exit's stage with everything bound."""

    def __init__(
        self, entry: Exit, stage: OnnxStage, options: ort.RunOptions, place: Place, hidden: ort.OrtValue
    ) -> None:
        self.stage, self._options = stage, options
        shape = (1, hidden.shape()[1], entry.num_candidates)
        self._ids: Tensor = place.message(shape, "int64")
        self._logprobs: Tensor = place.message(shape, "float32")
        self._binding = stage.session.io_binding()
        self._binding.bind_ortvalue_input(names.HIDDEN, hidden)
        self._binding.bind_ortvalue_output(names.EXIT_IDS, self._ids.value)
        self._binding.bind_ortvalue_output(names.EXIT_LOGPROBS, self._logprobs.value)

    def run(self) -> None:
        self.stage.run(self._binding, self._options)
        if self.stage.is_queued:
            self.stage.wait(self._binding)

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Copies of ids and log-probabilities: the draft worker reads them while the next pass may be running."""
        return self._ids.read()[0].copy(), self._logprobs.read()[0].copy()
