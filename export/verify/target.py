"""Parity of the target: exported segments and exits in ONNX Runtime, in float32, against the whole model in PyTorch.

Owns: the reference, the schedule of passes (prefill, single rows, windows with rollback), the comparison.
Does not own: tolerances (`tolerances.py`), the rounded weights of the reference (`rounded_weights.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from onnxruntime.capi import onnxruntime_pybind11_state
from torch import Tensor, nn

from mirrorsd.devices.onnxruntime.providers import ask_for_exact_integers
from mirrorsd.export.bundle.target_graphs import Adapter, TargetPlan
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.passes.upcast import float32_copies
from mirrorsd.export.stages.target import ExitStage
from mirrorsd.export.verify.comparison import Comparison, divergences, log_softmax
from mirrorsd.export.verify.rounded_weights import as_stored, stored_matrix
from mirrorsd.export.verify.text_passes import Pass, plan_passes
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS
from mirrorsd.families.experts import watched_routers
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import state_specs
from mirrorsd.graphs.errors import ExportError, errors_of, raised_as
from mirrorsd.graphs.manifest import Segment, VerifyResult

Array = npt.NDArray[Any]

ONNX_ERRORS = errors_of(onnxruntime_pybind11_state)
_KEPT = ("present_conv.", "present_state.", names.FED)
"""How the outputs of recurrent layers begin."""
_NEAR = 2e-3
"""Of a row's standard deviation: what arithmetic may change (`tolerances.py`)."""
_UNSURE = 1e-4
"""Of the standard deviation of a router's logits: two experts nearer than that may change places by arithmetic."""


class TargetReference(NamedTuple):
    """What PyTorch computes for `ids`: hidden `[P, H]` and exit log-probs `[P, V]` by border, logits `[P, V]`.

    `taps` are the hidden states `[P, H]` that heads read (`HeadShape.taps`). Tokens that are `undecided` `[P, V]`
    are so near to the last of a scan's best ones that arithmetic decides which of them is computed again. Rows that are
    `unsure` `[L + 1, P]` behind a layer are not compared there: arithmetic may have decided which experts they got.
    """

    ids: tuple[int, ...]
    hidden: dict[int, Array]
    exit_logprobs: dict[int, Array]
    logits: Array
    taps: dict[int, Array]
    undecided: Array
    unsure: Array

    def compared(self, step: "Pass", layer: int) -> Array:
        """Which of the rows that a pass keeps are compared behind `layer` layers: `[R]`."""
        return np.flatnonzero(~self.unsure[layer, _rows(step)])


def target_reference(model: WeightlessModel, plan: TargetPlan, ids: list[int]) -> TargetReference:
    """Run the whole float32 `model` over `ids` with Hugging Face's eager attention, one module's weights at a time.

    To be compared with stages, `model` and the adapters in `plan` hold the rounded numbers that the stages do.
    """
    network = model.network
    network.set_attn_implementation("eager")
    with torch.no_grad():
        before_norm: list[Any] = []
        last = parts_of(network).layers[-1]
        scanned: list[Tensor] = []
        hooks = [
            last.register_forward_hook(lambda module, given, found: before_norm.append(found)),
            network.get_output_embeddings().register_forward_hook(
                lambda module, given, found: scanned.append(found), prepend=True
            ),
        ]
        with model.on_demand(), watched_routers(parts_of(network).layers, _UNSURE) as unsure:
            output = network(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        for hook in hooks:
            hook.remove()
        hidden = {layer: output.hidden_states[layer] for layer in plan.adapters}
        exits = {
            layer: ExitStage(parts_of(network), plan.num_candidates, adapter)
            for layer, adapter in plan.adapters.items()
        }
        with model.loaded(nn.ModuleList(exits.values())):
            exit_logprobs = {
                layer: torch.log_softmax(stage.logits(hidden[layer]), dim=-1)[0].numpy()
                for layer, stage in exits.items()
            }
    by_layer = {layer: state[0].numpy() for layer, state in hidden.items()}
    of_last = before_norm[0] if isinstance(before_norm[0], Tensor) else before_norm[0][0]
    states = (*output.hidden_states[:-1], of_last, output.hidden_states[-1])
    taps = {layer: states[layer][0].numpy() for layer in plan.taps}
    undecided = _undecided(scanned[0][0], plan.formats.num_rescored).numpy()
    layers = [np.asarray(unsure.get(layer, [False] * len(ids))) for layer in range(-1, plan.shape.num_layers)]
    return TargetReference(
        tuple(ids), by_layer, exit_logprobs, output.logits[0].numpy(), taps, undecided, np.logical_or.accumulate(layers)
    )


def _undecided(scanned: Tensor, num_best: int) -> Tensor:
    """Where logits `[P, V]` are as good as the last one of the best."""
    if not 0 < num_best < scanned.shape[-1]:
        return torch.zeros_like(scanned, dtype=torch.bool)
    last = torch.topk(scanned, num_best).values[:, -1:]
    return (scanned - last).abs() < _NEAR * scanned.std(-1, keepdim=True)


def stored_reference(checkpoint: Checkpoint, plan: TargetPlan, ids: list[int]) -> TargetReference:
    """Run PyTorch in float32 with the weights as the stages of `plan` hold them: rounded, and floats again."""
    dtype: torch.dtype = getattr(torch, plan.shape.dtype)
    model = as_stored(open_model(checkpoint), plan.formats, dtype, plan.choose_pack)
    adapters: dict[int, Adapter | None] = {
        layer: None if pair is None else (_stored(pair[0], plan, dtype), _stored(pair[1], plan, dtype))
        for layer, pair in plan.adapters.items()
    }
    return target_reference(model, replace(plan, adapters=adapters), ids)


def _stored(half: Tensor, plan: TargetPlan, dtype: torch.dtype) -> Tensor:
    """One matrix of an adapter, which is stored like the head."""
    return stored_matrix(half, plan.formats.in_blocks.head, dtype)


@dataclass(slots=True)
class TargetRun:
    """The exported target in ONNX Runtime on the CPU, with share-buffer caches.

    `outputs` has one stage open at a time; `forward`, for passes that depend on each other, all segments from then on.
    With `in_float32`, 16-bit and integer targets run as copies whose arithmetic is float32 on the same stored weights.
    A bfloat16 target always does: its own graphs need another provider.
    """

    bundle: Path
    plan: TargetPlan
    in_float32: bool = False
    _segments: list["_SegmentRun"] = field(default_factory=list)
    _rolled: dict[str, Array] = field(default_factory=dict)

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
        """Run each segment over all passes, and close it before the next one is opened: each holds its own weights.

        Yields:
            For each pass its hidden `[S, H]` by border and tap, and its logits `[S, V]`.
        """
        flowing: list[Array] = [np.array([step.ids], np.int64) for step in steps]
        hidden: list[dict[int, Array]] = [{} for _ in steps]
        *inner, last = self.plan.segments
        for segment in inner:
            flowing = self._through(segment, steps, flowing, hidden)
            for states, rows in zip(hidden, flowing, strict=True):
                states[segment.end_layer] = rows[0]
        run = self._open_segment(last)
        for step, states, rows in zip(steps, hidden, flowing, strict=True):
            logits = run.forward(step, rows, states)[0]
            yield states, logits

    def _through(
        self, segment: Segment, steps: Sequence[Pass], flowing: Sequence[Array], hidden: Sequence[dict[int, Array]]
    ) -> list[Array]:
        """What one segment, which is open no longer than this, makes of all passes."""
        run = self._open_segment(segment)
        return [run.forward(step, rows, states) for step, rows, states in zip(steps, flowing, hidden, strict=True)]

    def exit(self, name: str, hidden: Sequence[Array]) -> list[tuple[Array, Array]]:
        """Run one exit on each hidden `[S, H]`; return ids and log-probs `[S, K]`."""
        session = self.open(self.plan.files[name])
        with raised_as(ExportError, f"ONNX Runtime failed while running {name}, just exported", ONNX_ERRORS):
            found = [session.run(None, {names.HIDDEN: rows[None]}) for rows in hidden]
        return [(ids[0], logprobs[0]) for ids, logprobs in found]

    def recurrence_error(self) -> float | None:
        """How far the recurrence stage is from the segments' own states after a pass whose last rows were rejected.

        It must do exactly what they do. None where there is no such stage, or was no such pass of `outputs`.
        """
        if not self._rolled:
            return None
        session = self.open(names.stage_file(names.RECURRENCE))
        given = {spec.name: self._rolled[spec.name] for spec in session.get_inputs()}
        with raised_as(ExportError, "ONNX Runtime failed while running the recurrence, just exported", ONNX_ERRORS):
            found = session.run(None, given)
        wanted = [self._rolled[spec.name] for spec in session.get_outputs()]
        return float(np.max([np.abs(ours - true).max() for ours, true in zip(found, wanted, strict=True)]))

    def _open_segment(self, segment: Segment) -> "_SegmentRun":
        layers = range(segment.first_layer, segment.end_layer)
        shape = self.plan.shape
        size = (1, shape.num_kv_heads, self.plan.capacity, shape.head_dim)
        kind = "float32" if self._is_copied else shape.dtype
        caches = {
            name(layer): ort.OrtValue.ortvalue_from_numpy(np.zeros(size, kind))
            for layer in layers
            if layer in shape.attention_layers
            for name in (names.past_key, names.past_value)
        }
        recurrent = [layer for layer in shape.recurrent_layers if layer in layers]
        specs = state_specs(shape, recurrent, names.past_conv, names.past_state)
        states = {spec.name: np.zeros([int(size) for size in spec.shape], kind) for spec in specs}
        return _SegmentRun(self.open(segment.file), layers, caches, states, self.plan.spare_rows, self._rolled)

    @property
    def _is_copied(self) -> bool:
        dtype = self.plan.shape.dtype
        return dtype == "bfloat16" or (self.in_float32 and (dtype, self.plan.formats) != ("float32", FLOAT_WEIGHTS))

    def open(self, file: str) -> ort.InferenceSession:
        """Open one of the bundle's stages."""
        if not self._is_copied:
            return open_stage(self.bundle / file)
        with float32_copies(self.bundle, [file]) as copies:
            return open_stage(self.bundle / copies[file], is_copy=True)


def open_stage(path: Path, *, is_copy: bool = False) -> ort.InferenceSession:
    """Open one exported stage, or its float32 copy, on the CPU, on as many threads as PyTorch has.

    A copy's weights are made floats one by one, at every run; it has no products of integers, for which ONNX Runtime
    would rewrite them.

    Raises:
        ExportError: ONNX Runtime does not take it.
    """
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # another stage's threads compute next
    if not is_copy:
        ask_for_exact_integers(options)
    kept = {"disabled_optimizers": ["ConstantFolding"]} if is_copy else {}
    with raised_as(ExportError, f"ONNX Runtime cannot open {path.name}, just exported", ONNX_ERRORS):
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], **kept)


@dataclass(frozen=True, slots=True)
class _SegmentRun:
    """One open segment, the caches of its layers and their states.

    `rolled` takes what the last pass with rejected rows did to the states: see `TargetRun.recurrence_error`.
    """

    session: ort.InferenceSession
    layers: range
    caches: dict[str, ort.OrtValue]
    states: dict[str, Array]
    spare_rows: int
    rolled: dict[str, Array]

    def forward(self, step: Pass, flowing: Array, taps: dict[int, Array] | None = None) -> Array:
        """Run one pass over ids or hidden states; return hidden `[1, S, H]` or logits `[1, S, V]`.

        The hidden states `[S, H]` that it gives for heads are added to `taps`.
        """
        total = step.start + len(step.ids) + self.spare_rows
        given = {
            names.INPUT_IDS: flowing,
            names.HIDDEN: flowing,
            names.SEQLENS_K: np.array([total - 1], np.int32),
            names.TOTAL_LENGTH: np.array(total, np.int32),
            names.LOGIT_ROWS: np.arange(len(step.ids), dtype=np.int64),
            names.NUM_ROWS: np.array([step.num_kept], np.int64),
        }
        if step.start == 0:
            self.states.update({name: np.zeros_like(state) for name, state in self.states.items()})
        given |= self.states
        binding = self.session.io_binding()
        for spec in self.session.get_inputs():
            if spec.name in given:
                binding.bind_cpu_input(spec.name, given[spec.name])
        asked = [spec.name for spec in self.session.get_outputs()]
        tapped = [layer for layer in range(self.layers.start + 1, self.layers.stop + 2) if names.tap(layer) in asked]
        for name in (asked[0], *map(names.tap, tapped)):
            binding.bind_output(name)
        kept = [name for name in asked if name.startswith(_KEPT)]
        for name in kept:
            binding.bind_output(name)
        for past, cache in self.caches.items():
            binding.bind_ortvalue_input(past, cache)
            binding.bind_ortvalue_output(past.replace("past", "present", 1), cache)
        with raised_as(ExportError, f"ONNX Runtime failed while running layers {self.layers}", ONNX_ERRORS):
            self.session.run_with_iobinding(binding)
            found: list[Array] = [value.numpy() for value in binding.get_outputs()[: 1 + len(tapped) + len(kept)]]
        self._move_on(step, dict(zip(kept, found[1 + len(tapped) :], strict=True)))
        if taps is not None:
            taps |= {layer: rows[0] for layer, rows in zip(tapped, found[1 : 1 + len(tapped)], strict=True)}
        return found[0]

    def _move_on(self, step: Pass, kept: dict[str, Array]) -> None:
        """Take the states after the kept rows; a pass with others is remembered, with what its kept rows fed."""
        if step.num_kept < len(step.ids):
            fed = {name: rows[:, : step.num_kept] for name, rows in kept.items() if name.startswith(names.FED)}
            self.rolled.update(self.states | kept | fed)
        present = {name: state for name, state in kept.items() if not name.startswith(names.FED)}
        self.states.update({name.replace("present", "past", 1): state for name, state in present.items()})


def compare_target(run: TargetRun, reference: TargetReference, text: str) -> tuple[VerifyResult, ...]:
    """Run every pass of `plan_passes` and compare all stages row by row.

    A prefix's best tokens and divergence are those of the exit fed with its hidden states.
    """
    found = {name: Comparison(name) for name in run.plan.files}
    found |= {names.tap(layer): Comparison(names.tap(layer)) for layer in run.plan.taps}
    steps, hidden = list(plan_passes(reference.ids)), []
    last = found[run.plan.segments[-1].name]
    for step, (states, logits) in zip(steps, run.outputs(steps), strict=True):
        ours, true = logits[: step.num_kept].astype(np.float32), reference.logits[_rows(step)]
        compared = reference.compared(step, run.plan.shape.num_layers)
        _compare_logits(last, ours[compared], np.where(reference.undecided[_rows(step)], ours, true)[compared])
        hidden.append({layer: state[: step.num_kept].astype(np.float32) for layer, state in states.items()})
        for layer, wanted in reference.taps.items():
            compared = reference.compared(step, min(layer, run.plan.shape.num_layers))
            _compare_tap(found[names.tap(layer)], hidden[-1][layer][compared], wanted[_rows(step)][compared])
    segment_before = {segment.end_layer: segment.name for segment in run.plan.segments}
    for point in run.plan.exits:
        states_here = [states[point.layer] for states in hidden]
        for step, state, guesses in zip(steps, states_here, run.exit(point.name, states_here), strict=True):
            compared = reference.compared(step, point.layer)
            wanted, logprobs = (
                by[point.layer][_rows(step)][compared] for by in (reference.hidden, reference.exit_logprobs)
            )
            prefix = found[segment_before[point.layer]]
            prefix.add(state[compared], wanted, wanted.std(axis=-1))
            _compare_exit((found[point.name], prefix), (guesses[0][compared], guesses[1][compared]), logprobs)
    if (error := run.recurrence_error()) is not None:
        found[names.RECURRENCE] = Comparison(names.RECURRENCE)
        found[names.RECURRENCE].add(np.array([[error]]), np.zeros((1, 1)), np.ones(1))
        found[names.RECURRENCE].add_choices(np.array([error == 0]), np.zeros(1))
    return tuple(comparison.result(text) for comparison in found.values())


def _compare_logits(comparison: Comparison, found: Array, expected: Array) -> None:
    """Compare logits `[R, V]`."""
    comparison.add(found, expected, expected.std(axis=-1))
    is_equal = found.argmax(-1) == expected.argmax(-1)
    by_row = [divergences(log_softmax(ours), log_softmax(true)) for ours, true in zip(found, expected, strict=True)]
    comparison.add_choices(is_equal, np.array(by_row))


def _compare_tap(comparison: Comparison, found: Array, expected: Array) -> None:
    """Compare hidden states `[R, H]`; of each row, the largest number counts as its best token."""
    comparison.add(found, expected, expected.std(axis=-1))
    comparison.add_choices(found.argmax(-1) == expected.argmax(-1), np.zeros(len(found)))


def _compare_exit(
    exit_and_prefix: tuple[Comparison, Comparison], guesses: tuple[Array, Array], logprobs: Array
) -> None:
    """Compare an exit's ids and log-probabilities `[R, K]` with all `logprobs [R, V]`."""
    ids, found = guesses
    expected = np.take_along_axis(logprobs, ids, -1)
    exit_and_prefix[0].add(found, expected, logprobs.std(axis=-1))
    for comparison in exit_and_prefix:
        comparison.add_choices(ids[:, 0] == logprobs.argmax(-1), divergences(found, expected))


def _rows(step: Pass) -> slice:
    """The rows of the text that a pass is compared at."""
    return slice(step.start, step.start + step.num_kept)
