"""Parity of the target: exported segments and exits, run by ONNX Runtime, against the whole model in PyTorch.

Owns: the reference, the schedule of passes (prefill, single rows, windows with rollback), the comparison.
Does not own: tolerances (`tolerances.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from torch import nn

from mirrorsd.families.registry import parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import VerifyResult

from .target_graphs import TargetPlan
from .target_stages import ExitStage
from .weightless import WeightlessModel

Array = npt.NDArray[Any]

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
    """The exported target in ONNX Runtime on the CPU, with share-buffer caches on the host."""

    bundle: Path
    plan: TargetPlan
    sessions: dict[str, ort.InferenceSession] = field(init=False)
    caches: dict[str, ort.OrtValue] = field(init=False)

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.sessions = {
            name: ort.InferenceSession(str(self.bundle / file), options, providers=["CPUExecutionProvider"])
            for name, file in self.plan.files.items()
        }
        shape = self.plan.shape
        size = (1, shape.num_kv_heads, self.plan.context, shape.head_dim)
        self.caches = {
            name(layer): ort.OrtValue.ortvalue_from_numpy(np.zeros(size, shape.dtype))
            for layer in range(shape.num_layers)
            for name in (names.past_key, names.past_value)
        }

    def forward(self, step: Pass) -> tuple[dict[int, Array], Array]:
        """Run the chain of segments; return hidden `[S, H]` by border and logits `[S, V]`."""
        total = step.start + len(step.ids)
        feeds: dict[str, Array] = {names.INPUT_IDS: np.array([step.ids], np.int64)}
        hidden: dict[int, Array] = {}
        for segment in self.plan.segments:
            feeds[names.SEQLENS_K] = np.array([total - 1], np.int32)
            feeds[names.TOTAL_LENGTH] = np.array(total, np.int32)
            if segment.end_layer == self.plan.shape.num_layers:
                feeds[names.LOGIT_ROWS] = np.arange(len(step.ids), dtype=np.int64)
            result = self._run_segment(segment.name, feeds, range(segment.first_layer, segment.end_layer))
            if segment.end_layer == self.plan.shape.num_layers:
                break
            hidden[segment.end_layer] = result[0]
            feeds = {names.HIDDEN: result}
        return hidden, result[0]

    def _run_segment(self, name: str, feeds: dict[str, Array], layers: range) -> Array:
        """Run one segment over its share-buffer caches; return hidden or logits."""
        binding = self.sessions[name].io_binding()
        for feed, value in feeds.items():
            binding.bind_cpu_input(feed, value)
        binding.bind_output(self.sessions[name].get_outputs()[0].name)
        pairs = ((names.past_key, names.present_key), (names.past_value, names.present_value))
        for layer in layers:
            for past, present in pairs:
                binding.bind_ortvalue_input(past(layer), self.caches[past(layer)])
                binding.bind_ortvalue_output(present(layer), self.caches[past(layer)])
        self.sessions[name].run_with_iobinding(binding)
        result: Array = binding.get_outputs()[0].numpy()
        return result

    def exit(self, name: str, hidden: Array) -> tuple[Array, Array]:
        """Run one exit on hidden `[S, H]`; return ids and log-probs `[S, K]`."""
        ids, logprobs = self.sessions[name].run(None, {names.HIDDEN: hidden[None]})
        return ids[0], logprobs[0]


def compare_target(run: TargetRun, reference: TargetReference, text: str) -> tuple[VerifyResult, ...]:
    """Run every pass of `plan_passes` and compare all stages row by row.

    A prefix's top-1 agreement is that of the exit fed with its hidden states. Its error is relative to the largest
    hidden value where that is above 1, as hidden states have no fixed scale.
    """
    found = {name: _Largest() for name in run.plan.files}
    exits = {point.layer: point.name for point in run.plan.exits}
    segment_before = {segment.end_layer: segment.name for segment in run.plan.segments}
    scale = {layer: max(1.0, float(np.abs(state).max())) for layer, state in reference.hidden.items()}
    for step in plan_passes(reference.ids):
        hidden, logits = run.forward(step)
        rows = slice(step.start, step.start + step.num_kept)
        for layer, state in hidden.items():
            ids, logprobs = run.exit(exits[layer], state[: step.num_kept])
            expected = reference.exit_logprobs[layer][rows]
            best = expected.argmax(-1)
            found[exits[layer]].add(logprobs, np.take_along_axis(expected, ids, -1), ids[:, 0], best)
            kept = state[: step.num_kept].astype(np.float32)
            found[segment_before[layer]].add(
                kept / scale[layer], reference.hidden[layer][rows] / scale[layer], ids[:, 0], best
            )
        expected = reference.logits[rows]
        kept = logits[: step.num_kept].astype(np.float32)
        found[run.plan.segments[-1].name].add(kept, expected, kept.argmax(-1), expected.argmax(-1))
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
