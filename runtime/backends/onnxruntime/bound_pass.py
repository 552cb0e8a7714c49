"""One pass of the target: its stages, bound for one number of rows to tensors at fixed addresses.

Owns: the bindings and their order, which passes a session keeps, and what they write to. Does not own: tensors and
running a stage (`stage`), opening stages (`device`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.devices.onnxruntime.device_memory import BestLogits
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage, PassMask, Place, RowBuffers, Tensor, host_scalar, run_options
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import fed_specs
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Exit, Segment, TargetEntry
from mirrorsd.runtime.backends.onnxruntime.states import SIDES, RecurrentStates
from mirrorsd.runtime.ledger import TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.short_rows import short_rows
from mirrorsd.texts.config import LONGEST_WINDOW


class OpenedTarget(Protocol):
    """What a pass binds: the target's opened stages, in order, and the device that they share."""

    @property
    def entry(self) -> TargetEntry:
        """The target in the manifest."""

    @property
    def device(self) -> OnnxDevice:
        """What all stages share."""

    @property
    def segments(self) -> Sequence[tuple[Segment, OnnxStage]]:
        """Every segment with its stage."""

    @property
    def exits(self) -> Mapping[int, tuple[Exit, OnnxStage]]:
        """The exits that run here, by layer."""

    @property
    def takes_trees(self) -> bool:
        """Whether the stages are masked ones."""


class _Inputs:
    """What the host says of a pass's rows before it begins."""

    def __init__(self, place: Place, num_rows: int) -> None:
        self.num_rows = place.message((1,), "int64")
        self._ids, self._seqlens_k = place.message((1, num_rows), "int64"), place.message((1,), "int32")
        self._last_row = np.zeros(1, dtype=np.int32)
        self._total_length, total_length = host_scalar()
        self.values = {
            names.INPUT_IDS: self._ids.value,
            names.SEQLENS_K: self._seqlens_k.value,
            names.TOTAL_LENGTH: total_length,
            names.NUM_ROWS: self.num_rows.value,
        }

    def write(self, tokens: NDArray[np.int64], total: int, told_total: int) -> None:
        self._ids.write(tokens[None])
        self._last_row[0] = total - 1
        self._seqlens_k.write(self._last_row)
        self._total_length[()] = told_total


class _Answer:
    """What a pass says, and how it is read."""

    def __init__(self, place: Place, logits: Tensor, dtype: str, best: BestLogits | None) -> None:
        num_rows = logits.value.shape()[1]
        self._ids, self._gaps = place.message((1, num_rows), "int64"), place.message((1, num_rows), "float32")
        self._logits, self._dtype, self._best = logits, dtype, best
        self.values = {
            names.LOGITS: logits.value,
            names.ARGMAX_IDS: self._ids.value,
            names.ARGMAX_GAP: self._gaps.value,
        }

    def read(self, num_rows: int, with_logits: bool | ShortlistFilter) -> TargetOutput:
        ids, gaps = self._ids.read()[0, :num_rows], self._gaps.read()[0, :num_rows]
        if isinstance(with_logits, ShortlistFilter) and self._best is not None:
            best = self._best.read(self._logits.value, self._dtype, with_logits.temperature, num_rows)
            if (rows := short_rows(best, with_logits)) is not None:
                return TargetOutput(ids, gaps, None, rows)
        return TargetOutput(ids, gaps, self._logits.read()[0, :num_rows] if with_logits else None)


class BoundPass:
    """All stages bound for one number of rows; captured as graphs where the device does that, prefill never."""

    def __init__(
        self,
        model: OpenedTarget,
        cache: Mapping[str, ort.OrtValue],
        buffers: RowBuffers,
        num_rows: int,
        *,
        logit_rows: int,
        states: RecurrentStates | None = None,
    ) -> None:
        shape, place = model.entry.shape, model.device.place
        self.fed: dict[str, Tensor] = {}
        self._states = states
        self._inputs = _Inputs(place, num_rows)
        rows = place.message((logit_rows,), "int64")
        rows.write(np.arange(num_rows - logit_rows, num_rows))
        last_stage = model.segments[-1][1]
        logits_shape = (1, logit_rows, shape.vocab_size)
        logits = buffers.rows(last_stage, names.LOGITS, logits_shape, shape.logits_dtype)
        self._answer = _Answer(place, logits, shape.logits_dtype, model.device.best_logits)
        captures = model.device.captures and logit_rows == num_rows
        self._graph = model.device.next_graph() if captures else None
        # A captured graph keeps the length it was captured with: the whole capacity holds for every pass.
        self._fixed_length = model.entry.capacity if captures else None
        self._spare_rows = model.entry.spare_rows
        values = {**self._inputs.values, names.LOGIT_ROWS: rows.value, **self._answer.values, **cache}
        self._mask: PassMask | None = None
        if model.takes_trees:
            count, capacity = num_rows + self._spare_rows, model.entry.capacity
            self._mask = PassMask(place, count, shape.dtype, capacity, self._fixed_length)
            values |= self._mask.values
        self._bind(model, values, buffers, num_rows, keeps_all=logit_rows < num_rows)

    def _bind(
        self,
        model: OpenedTarget,
        values: dict[str, ort.OrtValue],
        buffers: RowBuffers,
        num_rows: int,
        *,
        keeps_all: bool,
    ) -> None:
        shape, place = model.entry.shape, model.device.place
        self.options = options = run_options(self._graph, has_queue=model.device.stream is not None)
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
            if not keeps_all:
                layers = [layer for layer in shape.recurrent_layers if segment.first_layer <= layer < segment.end_layer]
                for spec in fed_specs(shape, layers):
                    size = (1, num_rows, int(spec.shape[2]))
                    self.fed[spec.name] = fed = buffers.rows(stage, spec.name, size, spec.dtype)
                    values[spec.name] = fed.value
            bound = BoundSegment(segment, stage, options, values, hidden, self._states)
            if place.copies_when_bound:
                bound.copy_messages({name: value for name, value in values.items() if value.device_name() == "cpu"})
            self.segments.append(bound)
            if hidden is not None and segment.end_layer in model.exits:
                entry, exit_stage = model.exits[segment.end_layer]
                self.exits[segment.end_layer] = _BoundExit(entry, exit_stage, options, place, hidden.value)

    def write(
        self, tokens: NDArray[np.int64], start: int, num_rows: int, parents: NDArray[np.int64] | None = None
    ) -> None:
        """Set this pass's rows, of which so many count, and how many cache rows there are after it."""
        total = start + len(tokens) + self._spare_rows
        self._inputs.write(tokens, total, self._fixed_length or total)
        if self._states is not None:
            self._inputs.num_rows.write(np.array([num_rows]))
        if self._mask is not None:
            changed = self._mask.write(start, None if parents is None else parents.tolist(), total)
            for segment in self.segments:
                segment.bind_again(changed)

    def read(self, num_rows: int, *, with_logits: bool | ShortlistFilter) -> TargetOutput:
        """The answer of the first `num_rows`; logits are copied from a device only if they are wanted.

        Where all that a filter keeps is among the best, these alone are.
        """
        return self._answer.read(num_rows, with_logits)

    def release(self) -> None:
        """Forget the captured graphs, before what they point at goes."""
        for stage in (*(bound.stage for bound in self.segments), *(bound.stage for bound in self.exits.values())):
            stage.release(self._graph)


class SessionPasses:
    """A session's passes, by their numbers of rows, on its caches.

    Attributes:
        caches: past and present keys and values, by name.
        bound: passes over windows.
        prefills: those over prompts, that used last behind the other.
    """

    def __init__(self, model: OpenedTarget, caches: Mapping[str, ort.OrtValue], states: RecurrentStates | None) -> None:
        self.caches, self._model, self._states = caches, model, states
        self._buffers = RowBuffers(model.device.place, LONGEST_WINDOW + 1)
        self.bound: dict[int, BoundPass] = {}
        self.prefills: dict[int, BoundPass] = {}

    def of(self, num_rows: int, *, is_prefill: bool) -> BoundPass:
        """The pass of so many rows.

        Windows have few sizes, and all are kept. A prompt is read in whole chunks, and one of any size at its end: two
        are kept, those used last.
        """
        passes = self.prefills if is_prefill else self.bound
        found = passes.pop(num_rows, None)
        if found is None:
            if is_prefill and len(passes) > 1:
                passes.pop(next(iter(passes))).release()
            rows = {"num_rows": num_rows, "logit_rows": 1 if is_prefill else num_rows}
            with raised_as(DeviceError, f"ONNX Runtime could not bind a pass of {num_rows} rows", ONNX_ERRORS):
                found = BoundPass(self._model, self.caches, self._buffers, **rows, states=self._states)
        passes[num_rows] = found
        return found

    def move_to(self, caches: Mapping[str, ort.OrtValue]) -> None:
        """Bind passes to other caches from now on."""
        for passes in (self.bound, self.prefills):
            for one in passes.values():
                one.release()
            passes.clear()
        self.caches = caches

    def close(self) -> None:
        """Drop bindings, captured graphs, buffers and cache."""
        self.move_to({})
        self._buffers.clear()


class BoundSegment:
    """One segment's stage with everything bound."""

    def __init__(
        self,
        segment: Segment,
        stage: OnnxStage,
        options: ort.RunOptions,
        values: dict[str, ort.OrtValue],
        hidden: Tensor | None,
        states: RecurrentStates | None,
    ) -> None:
        self.name, self.end_layer, self.stage, self.hidden = segment.name, segment.end_layer, stage, hidden
        self._options, self._states = options, states
        self._messages: dict[str, ort.OrtValue] = {}
        sets = [states.values(side) for side in SIDES] if states is not None else [{}]
        self._bindings = [_bound_to(stage, values | by_side) for by_side in sets]

    @property
    def _binding(self) -> ort.IOBinding:
        """Where states are, the one that reads the set which holds them now."""
        return self._bindings[self._states.side if self._states is not None else 0]

    def copy_messages(self, values: dict[str, ort.OrtValue]) -> None:
        """Bind those inputs again before every run: that is what copies them from the host."""
        self._messages = {
            spec.name: values[spec.name] for spec in self.stage.session.get_inputs() if spec.name in values
        }

    def bind_again(self, values: Mapping[str, ort.OrtValue]) -> None:
        """Take other tensors for these inputs.

        Raises:
            DeviceError: the device has no room for them.
        """
        with raised_as(DeviceError, f"ONNX Runtime could not bind the inputs of {self.name}", ONNX_ERRORS):
            for name, value in values.items():
                if name in self._messages:
                    self._messages[name] = value
                else:
                    self._binding.bind_ortvalue_input(name, value)

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


def _bound_to(stage: OnnxStage, values: dict[str, ort.OrtValue]) -> ort.IOBinding:
    """All inputs of a stage, and those of its outputs that have a place; what is fed to a recurrence may have none."""
    binding = stage.session.io_binding()
    for spec in stage.session.get_inputs():
        binding.bind_ortvalue_input(spec.name, values[spec.name])
    for spec in stage.session.get_outputs():
        name = names.NEXT_HIDDEN if spec.name == names.HIDDEN else spec.name
        if name in values or not name.startswith(names.FED):
            binding.bind_ortvalue_output(spec.name, values[name])
    return binding


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
