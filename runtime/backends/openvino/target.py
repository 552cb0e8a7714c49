"""The target on OpenVINO (CPU, Intel GPU): the bundle's own ONNX stages, read by OpenVINO's ONNX frontend.

The stages' caches are share-buffer: a pass reads the first rows of a buffer of fixed capacity and gives back those rows
with the new ones behind them. The host keeps the buffers and copies the new rows in, so that rejected rows are rolled
back by number here too. Exactness first: on a GPU the caches travel through host memory at every pass.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.hardware import target_name
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS, said_of
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Exit, Head, Segment, TargetEntry
from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits
from mirrorsd.runtime.backends.protocol import Kept, TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

_NEAR_TIE_GAPS = {"float32": 1e-3, "float16": 5e-2}


class OpenVinoTargetModel:
    """The target's graphs, compiled once for every number of rows. Load it on the target worker's thread."""

    def __init__(
        self,
        bundle: Path,
        entry: TargetEntry,
        placement: TargetPlacement,
        exits: OpenVinoExits | None = None,
        heads: Sequence[Head] = (),
    ) -> None:
        """Compile the stages; `exits`, if given, stand in for the target's own. Heads do not run here."""
        self.entry, self.placement, self.exits_elsewhere = entry, placement, exits
        if kept := entry.shape.kept_on_processor:
            raise DeviceError(
                f"this bundle's target has {kept}, which run on ONNX Runtime only; this device map's target runs on "
                "OpenVINO. Choose another device map (`mirrorsd devices`)"
            )
        core = new_core()
        self.segments = [(s, _compile(core, bundle / s.file, entry.capacity, placement)) for s in entry.segments]
        self.exits = {
            e.layer: (e, _compile(core, bundle / e.file, entry.capacity, placement))
            for e in (() if exits else entry.exits)
        }

    def new_session(self) -> "OpenVinoTarget":
        """A session with a cache of its own on the shared graphs."""
        with raised_as(DeviceError, "OpenVINO has no room for a session of the target", (*OPENVINO_ERRORS, ValueError)):
            return OpenVinoTarget(self)

    def open_batch(self, num_slots: int) -> None:
        """Conversations take turns here."""

    def describe(self) -> str:
        """One line for `pipe.placement`, with the devices that the graphs really use."""
        devices = sorted({str(one) for _, model in self.segments for one in model.get_property("EXECUTION_DEVICES")})
        elsewhere = f"; {self.exits_elsewhere.describe()}" if self.exits_elsewhere else ""
        named = "" if self.placement.is_on_cpu else f" ({target_name(self.placement)})"
        return f"target: openvino {', '.join(devices)}{named}, {self.placement.threads} thread(s){elsewhere}"


class OpenVinoTarget(TargetSession):
    """A `TargetSession` on an OpenVINO device: one cache in host memory, and the requests that read it."""

    def __init__(self, model: OpenVinoTargetModel) -> None:
        entry = model.entry
        self.context = entry.context
        self.vocab_size = entry.shape.vocab_size
        self.row_group, self.takes_trees = 1, False
        self.heads: Mapping[str, Head] = {}
        self.near_tie_gap = _NEAR_TIE_GAPS.get(entry.shape.dtype, 5e-2)
        self._segments = [_SegmentRequest(*segment, entry) for segment in model.segments]
        self._exits_elsewhere = model.exits_elsewhere
        self._exits = {layer: _ExitRequest(*point) for layer, point in model.exits.items()}

    def run(
        self,
        tokens: NDArray[np.int64],
        start: int,
        *,
        with_logits: bool | ShortlistFilter,
        ledger: Ledger,
        on_exit: Callable[[ExitGuesses], None] | None = None,
        exits: Collection[int] | None = None,
        parents: NDArray[np.int64] | None = None,
    ) -> TargetOutput:
        rows = tokens[None]
        logit_rows = np.arange(len(tokens), dtype=np.int64)
        for segment in self._segments:
            with ledger.time("target", segment.name):
                rows = segment.run(rows, start, logit_rows)
            is_asked = exits is None or segment.end_layer in exits
            if on_exit is not None and is_asked and segment is not self._segments[-1]:
                with ledger.time("target", "exit"):
                    guesses = self._guess(segment.end_layer, rows)
                on_exit(guesses)
        with ledger.time("target", "read"):
            return self._segments[-1].read(bool(with_logits))

    def _guess(self, layer: int, hidden: NDArray[Any]) -> ExitGuesses:
        if self._exits_elsewhere is not None:
            return self._exits_elsewhere.guess(layer, hidden)
        return ExitGuesses(layer, *self._exits[layer].run(hidden))

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        rows, last_row = tokens[None], np.array([len(tokens) - 1], dtype=np.int64)
        with ledger.time("target", "prefill"):
            for segment in self._segments:
                rows = segment.run(rows, start, last_row)

    def warm_up(self, num_rows: int) -> None:
        """Run once with 1 and with `num_rows` rows, so that the first request pays nothing."""
        for size in {1, num_rows}:
            self.run(np.zeros(size, dtype=np.int64), 0, with_logits=False, ledger=Ledger(), on_exit=lambda _: None)

    def resumable(self, position: int) -> int:
        return position

    def read_cache(self, num_rows: int) -> Kept:
        caches = [cache for segment in self._segments for cache in segment.caches]
        return Kept(num_rows, [cache[:, :, :num_rows].copy() for cache in caches])

    def write_cache(self, kept: Kept) -> None:
        caches = [cache for segment in self._segments for cache in segment.caches]
        for cache, new in zip(caches, kept.rows, strict=True):
            cache[:, :, : new.shape[2]] = new

    def terminate(self) -> None:
        for segment in tuple(self._segments):
            segment.cancel()

    def close(self) -> None:
        """Drop requests and cache."""
        self._segments.clear()
        self._exits.clear()


class _SegmentRequest:
    """One segment with the caches of its layers bound."""

    def __init__(self, segment: Segment, compiled: ov.CompiledModel, entry: TargetEntry) -> None:
        self._spare_rows = entry.spare_rows
        cache_shape = (1, entry.shape.num_kv_heads, entry.capacity, entry.shape.head_dim)
        self.name, self.end_layer = segment.name, segment.end_layer
        self._request = compiled.create_infer_request()
        inputs = {name for port in compiled.inputs for name in port.get_names()}
        self._rows_input = names.INPUT_IDS if names.INPUT_IDS in inputs else names.HIDDEN
        self._takes_logit_rows = names.LOGIT_ROWS in inputs
        self._rows_output = names.HIDDEN if names.INPUT_IDS in inputs else names.NEXT_HIDDEN
        self._seqlens_k, self._total_length = np.zeros(1, dtype=np.int32), np.zeros((), dtype=np.int32)
        self._bind(names.SEQLENS_K, self._seqlens_k)
        self._bind(names.TOTAL_LENGTH, self._total_length)
        self._caches: list[tuple[NDArray[Any], str]] = []
        for layer in range(segment.first_layer, segment.end_layer):
            pairs = ((names.past_key, names.present_key), (names.past_value, names.present_value))
            for past, present in pairs:
                cache = np.zeros(cache_shape, dtype=entry.shape.dtype)
                self._bind(past(layer), cache)
                self._caches.append((cache, present(layer)))

    def run(self, rows: NDArray[Any], start: int, logit_rows: NDArray[np.int64]) -> NDArray[Any]:
        """Run `rows` (ids or hidden states) at positions `start ..`; returns the hidden states, or nothing of use."""
        total = start + rows.shape[1] + self._spare_rows
        self._seqlens_k[0], self._total_length[()] = total - 1, total
        with _failures_of(self.name):
            self._bind(self._rows_input, rows)
            if self._takes_logit_rows:
                self._bind(names.LOGIT_ROWS, logit_rows)
            self._request.infer()
            for cache, present in self._caches:
                cache[:, :, start:total] = self._request.get_tensor(present).data[:, :, start:total]
            return rows if self._takes_logit_rows else self._output(self._rows_output)

    @property
    def caches(self) -> list[NDArray[Any]]:
        """Keys and values of its layers, `[1, heads, capacity, size]` each."""
        return [cache for cache, _ in self._caches]

    def cancel(self) -> None:
        """End the run that is under way, if there is one."""
        self._request.cancel()

    def read(self, with_logits: bool) -> TargetOutput:
        """What the last segment says: copies, since the next pass overwrites the device's own."""
        argmax_ids, argmax_gap = (self._output(name)[0].copy() for name in (names.ARGMAX_IDS, names.ARGMAX_GAP))
        return TargetOutput(argmax_ids, argmax_gap, self._output(names.LOGITS)[0].copy() if with_logits else None)

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))

    def _output(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self._request.get_tensor(name).data
        return found


class _ExitRequest:
    """One exit; its candidates are copied, since the draft worker reads them while the next pass may be running."""

    def __init__(self, entry: Exit, compiled: ov.CompiledModel) -> None:
        self._name, self._request = entry.name, compiled.create_infer_request()

    def run(self, hidden: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        with _failures_of(self._name):
            self._request.set_tensor(names.HIDDEN, ov.Tensor(hidden, shared_memory=True))
            self._request.infer()
            ids, logprobs = (self._request.get_tensor(name).data for name in (names.EXIT_IDS, names.EXIT_LOGPROBS))
            return ids[0].copy(), logprobs[0].copy()


def _compile(core: ov.Core, path: Path, capacity: int, placement: TargetPlacement) -> ov.CompiledModel:
    """Read one stage; rows stay symbolic, the caches' capacity becomes fixed."""
    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if placement.precision != "auto":
        options["INFERENCE_PRECISION_HINT"] = placement.precision
    if placement.device == "CPU":
        options |= {"INFERENCE_NUM_THREADS": placement.threads, "ENABLE_CPU_PINNING": False}
        # The CPU plugin would otherwise round activations to eight bits under int4 and int8 weights.
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    device = placement.device if placement.device == "CPU" else f"{placement.device}.{placement.device_id}"
    try:
        model = core.read_model(path)
        caches = {port.get_any_name(): port.get_partial_shape() for port in model.inputs}
        caches = {name: shape for name, shape in caches.items() if name.startswith("past_")}
        for shape in caches.values():
            shape[2] = capacity
        if caches:
            model.reshape(caches)
        return core.compile_model(model, device, options)
    except OPENVINO_ERRORS as error:
        raise DeviceError(
            f"OpenVINO could not load {path.name} on {device}: "
            + said_of(path, error, "Choose another device map (`mirrorsd devices`), or export the bundle again.")
        ) from error


def _failures_of(stage: str) -> AbstractContextManager[None]:
    return raised_as(DeviceError, f"OpenVINO failed while running the target's {stage}", OPENVINO_ERRORS)
