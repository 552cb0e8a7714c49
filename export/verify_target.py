"""Parity of the target: exported segments and exits, run by ONNX Runtime, against the whole model in PyTorch.

Owns: the reference, the schedule of passes (prefill, single rows, windows with rollback), the comparison.
Does not own: tolerances (`tolerances.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state
from torch import nn

from mirrorsd.families.registry import parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError, errors_of, raised_as
from mirrorsd.graphs.manifest import Segment, VerifyResult

from .target_graphs import TargetPlan
from .target_stages import ExitStage
from .upcast import float32_copies
from .weightless import WeightlessModel

Array = npt.NDArray[Any]

ONNX_ERRORS = errors_of(onnxruntime_pybind11_state)
WINDOW = 6
REJECTED = 3


class TargetReference(NamedTuple):
    """What PyTorch computes for `ids`: hidden `[P, H]` and exit log-probs `[P, V]` by border, logits `[P, V]`."""

    ids: tuple[int, ...]
    hidden: dict[int, Array]
    exit_logprobs: dict[int, Array]
    logits: Array


class Pass(NamedTuple):
    """Feed `ids` behind the first `start` cached rows; the first `num_kept` rows are compared and kept."""

    start: int
    ids: tuple[int, ...]
    num_kept: int


def target_reference(model: WeightlessModel, plan: TargetPlan, ids: list[int]) -> TargetReference:
    """Run the whole float32 `model` over `ids` with Hugging Face's eager attention, one module's weights at a time."""
    network = model.network
    network.set_attn_implementation("eager")
    with torch.no_grad():
        with model.on_demand():
            output = network(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        hidden = {layer: output.hidden_states[layer] for layer in plan.adapters}
        exits = {
            layer: ExitStage(parts_of(network), plan.num_candidates, adapter)
            for layer, adapter in plan.adapters.items()
        }
        with model.loaded(nn.ModuleList(exits.values())):
            exit_logprobs = {layer: stage.logprobs(hidden[layer])[0].numpy() for layer, stage in exits.items()}
    by_layer = {layer: state[0].numpy() for layer, state in hidden.items()}
    return TargetReference(tuple(ids), by_layer, exit_logprobs, output.logits[0].numpy())


def plan_passes(ids: tuple[int, ...]) -> Iterator[Pass]:
    """Cover `ids`: half by one prefill, a quarter row by row, the rest by windows whose end is rejected.

    A window of 6 keeps 6; the next one adds 3 wrong rows, which `seqlens_k` alone rolls back.
    """
    half, three_quarters = len(ids) // 2, len(ids) * 3 // 4
    yield Pass(0, ids[:half], half)
    for start in range(half, three_quarters):
        yield Pass(start, ids[start : start + 1], 1)
    for number, start in enumerate(range(three_quarters, len(ids), WINDOW)):
        kept = ids[start : start + WINDOW]
        wrong = ids[:REJECTED] if number % 2 else ()
        yield Pass(start, (*kept, *wrong), len(kept))


@dataclass(slots=True)
class _Largest:
    """Running comparison of one stage."""

    error: float = 0.0
    num_equal: int = 0
    num_rows: int = 0

    def add(self, found: Array, expected: Array, found_best: Array, expected_best: Array) -> None:
        self.error = max(self.error, float(np.abs(found - expected).max()))
        self.num_equal += int((found_best == expected_best).sum())
        self.num_rows += len(expected_best)


@dataclass(slots=True)
class TargetRun:
    """The exported target in ONNX Runtime on the CPU, with share-buffer caches.

    `outputs` has one stage open at a time; `forward`, for passes that depend on each other, all segments from then on.
    A bfloat16 target runs as float32 copies: its own graphs need another provider.
    """

    bundle: Path
    plan: TargetPlan
    _segments: list["_SegmentRun"] = field(default_factory=list)

    def forward(self, step: Pass) -> tuple[dict[int, Array], Array]:
        """Run the chain of segments; return hidden `[S, H]` by border and logits `[S, V]`."""
        self._segments = self._segments or [self._open_segment(segment) for segment in self.plan.segments]
        flowing: Array = np.array([step.ids], np.int64)
        hidden: dict[int, Array] = {}
        for run in self._segments:
            flowing = run.forward(step, flowing)
            hidden[run.layers.stop] = flowing[0]
        return hidden, hidden.pop(self.plan.shape.num_layers)

    def outputs(self, steps: Sequence[Pass]) -> Iterator[tuple[dict[int, Array], Array]]:
        """Run each segment over all passes before the next one is opened.

        Yields:
            For each pass its hidden `[S, H]` by border and its logits `[S, V]`.
        """
        flowing: list[Array] = [np.array([step.ids], np.int64) for step in steps]
        hidden: list[dict[int, Array]] = [{} for _ in steps]
        *inner, last = self.plan.segments
        for segment in inner:
            run = self._open_segment(segment)
            flowing = [run.forward(step, rows) for step, rows in zip(steps, flowing, strict=True)]
            for states, rows in zip(hidden, flowing, strict=True):
                states[segment.end_layer] = rows[0]
        run = self._open_segment(last)
        for step, states, rows in zip(steps, hidden, flowing, strict=True):
            yield states, run.forward(step, rows)[0]

    def exit(self, name: str, hidden: Sequence[Array]) -> list[tuple[Array, Array]]:
        """Run one exit on each hidden `[S, H]`; return ids and log-probs `[S, K]`."""
        session = self._open(self.plan.files[name])
        with raised_as(ExportError, f"ONNX Runtime failed while running {name}, just exported", ONNX_ERRORS):
            found = [session.run(None, {names.HIDDEN: rows[None]}) for rows in hidden]
        return [(ids[0], logprobs[0]) for ids, logprobs in found]

    def _open_segment(self, segment: Segment) -> "_SegmentRun":
        layers = range(segment.first_layer, segment.end_layer)
        shape = self.plan.shape
        size = (1, shape.num_kv_heads, self.plan.capacity, shape.head_dim)
        kind = "float32" if self._is_widened else shape.dtype
        caches = {
            name(layer): ort.OrtValue.ortvalue_from_numpy(np.zeros(size, kind))
            for layer in layers
            for name in (names.past_key, names.past_value)
        }
        return _SegmentRun(self._open(segment.file), layers, caches, self.plan.spare_rows)

    @property
    def _is_widened(self) -> bool:
        return self.plan.shape.dtype == "bfloat16"

    def _open(self, file: str) -> ort.InferenceSession:
        if not self._is_widened:
            return open_stage(self.bundle / file)
        with float32_copies(self.bundle, [file]) as copies:
            return open_stage(self.bundle / copies[file], disabled_optimizers=["ConstantFolding"])


def open_stage(path: Path, **settings: list[str]) -> ort.InferenceSession:
    """Open one exported stage on the CPU, with further settings of ONNX Runtime's session.

    Raises:
        ExportError: ONNX Runtime does not take it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    with raised_as(ExportError, f"ONNX Runtime cannot open {path.name}, just exported", ONNX_ERRORS):
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], **settings)


@dataclass(frozen=True, slots=True)
class _SegmentRun:
    """One open segment and the caches of its layers."""

    session: ort.InferenceSession
    layers: range
    caches: dict[str, ort.OrtValue]
    spare_rows: int

    def forward(self, step: Pass, flowing: Array) -> Array:
        """Run one pass over ids or hidden states; return hidden `[1, S, H]` or logits `[1, S, V]`."""
        total = step.start + len(step.ids) + self.spare_rows
        given = {
            names.INPUT_IDS: flowing,
            names.HIDDEN: flowing,
            names.SEQLENS_K: np.array([total - 1], np.int32),
            names.TOTAL_LENGTH: np.array(total, np.int32),
            names.LOGIT_ROWS: np.arange(len(step.ids), dtype=np.int64),
        }
        binding = self.session.io_binding()
        for spec in self.session.get_inputs():
            if spec.name in given:
                binding.bind_cpu_input(spec.name, given[spec.name])
        binding.bind_output(self.session.get_outputs()[0].name)
        pairs = ((names.past_key, names.present_key), (names.past_value, names.present_value))
        for layer in self.layers:
            for past, present in pairs:
                binding.bind_ortvalue_input(past(layer), self.caches[past(layer)])
                binding.bind_ortvalue_output(present(layer), self.caches[past(layer)])
        with raised_as(ExportError, f"ONNX Runtime failed while running layers {self.layers}", ONNX_ERRORS):
            self.session.run_with_iobinding(binding)
            result: Array = binding.get_outputs()[0].numpy()
        return result


def compare_target(run: TargetRun, reference: TargetReference, text: str) -> tuple[VerifyResult, ...]:
    """Run every pass of `plan_passes` and compare all stages row by row.

    A prefix's top-1 agreement is that of the exit fed with its hidden states. Its error is relative to the largest
    hidden value where that is above 1, as hidden states have no fixed scale.
    """
    found = {name: _Largest() for name in run.plan.files}
    steps, hidden = list(plan_passes(reference.ids)), []
    last = found[run.plan.segments[-1].name]
    for step, (states, logits) in zip(steps, run.outputs(steps), strict=True):
        kept, expected = logits[: step.num_kept].astype(np.float32), reference.logits[_rows(step)]
        last.add(kept, expected, kept.argmax(-1), expected.argmax(-1))
        hidden.append({layer: state[: step.num_kept] for layer, state in states.items()})
    segment_before = {segment.end_layer: segment.name for segment in run.plan.segments}
    for point in run.plan.exits:
        states_here = [states[point.layer] for states in hidden]
        guesses = run.exit(point.name, states_here)
        scale = max(1.0, float(np.abs(reference.hidden[point.layer]).max()))
        for step, state, (ids, logprobs) in zip(steps, states_here, guesses, strict=True):
            expected = reference.exit_logprobs[point.layer][_rows(step)]
            best = expected.argmax(-1)
            found[point.name].add(logprobs, np.take_along_axis(expected, ids, -1), ids[:, 0], best)
            wanted = reference.hidden[point.layer][_rows(step)]
            found[segment_before[point.layer]].add(state.astype(np.float32) / scale, wanted / scale, ids[:, 0], best)
    return tuple(
        VerifyResult(
            stage=name,
            max_abs_error=result.error,
            top1_agreement=result.num_equal / result.num_rows,
            positions=result.num_rows,
            text=text,
        )
        for name, result in found.items()
    )


def _rows(step: Pass) -> slice:
    """The rows of the text that a pass is compared at."""
    return slice(step.start, step.start + step.num_kept)
