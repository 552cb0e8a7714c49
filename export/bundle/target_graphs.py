"""The target's graphs in a bundle: which stages there are, and writing them around one weights file.

Owns: segments and exits as ONNX files. Does not own: the modules (`stages/target.py`), the passes (`graph_passes.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.checkpoints.head import HeadCheckpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.passes.graph_passes import optimise_head, optimise_stage
from mirrorsd.export.passes.quantise import ChoosePack, round_to_nearest
from mirrorsd.export.passes.spare_row import SPARE_ROWS
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
from mirrorsd.export.stages.attention import GQA_ATTENTION
from mirrorsd.export.stages.head import HeadStage
from mirrorsd.export.stages.recurrence import RecurrenceStage
from mirrorsd.export.stages.target import ExitStage, SegmentStage
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS, WeightFormats
from mirrorsd.export.weights.weights_file import WeightsFile
from mirrorsd.families.heads.lending import lent_by
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.atomic_folder import check_space, flush_to_disk
from mirrorsd.graphs.contract import TargetShape, exit_contract, head_contract, recurrence_contract, segment_contract
from mirrorsd.graphs.manifest import Exit, Segment, SourceModel, TargetEntry, WeightStorage

Adapter = tuple[Tensor, Tensor]

WEIGHTS = "weights"
_RECORD_EVERY = 1 << 30
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """Everything that decides the target's graphs; `adapters` is by exit layer, None for a plain exit.

    `choose_pack` rounds the layers' weights where `formats` wants integers. `heads` draft from its hidden states.
    """

    shape: TargetShape
    context: int
    num_candidates: int
    adapters: dict[int, Adapter | None]
    formats: WeightFormats = FLOAT_WEIGHTS
    choose_pack: ChoosePack = round_to_nearest
    is_batch_invariant: bool = True
    heads: tuple[HeadCheckpoint, ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that heads read, by layer."""
        return tuple(sorted({tap for head in self.heads for tap in head.shape.taps}))

    @property
    def spare_rows(self) -> int:
        """Rows of zeros that attention gets behind those of a pass: in float32, where rows then never differ."""
        return SPARE_ROWS if self.is_batch_invariant and self.shape.dtype == "float32" else 0

    @property
    def row_group(self) -> int:
        """Rows that are computed together: see `TargetEntry.row_group`.

        In float16 a row alone differs from one of several, in attention and in products.
        """
        if not self.is_batch_invariant:
            return 1
        return max(self.formats.row_group, _PAIR if self.shape.dtype == "float16" else 1)

    @property
    def capacity(self) -> int:
        """Rows of a cache: the longest text, and the spare rows behind it."""
        return self.context + self.row_group - 1 + self.spare_rows

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The chain of segments with a border at every exit layer."""
        edges = (0, *self.adapters, self.shape.num_layers)
        spans = zip(names.segment_names(len(edges) - 1), edges, edges[1:], strict=False)
        return tuple(
            Segment(
                name=name,
                file=names.stage_file(name),
                first_layer=first,
                end_layer=end,
                taps=tuple(tap for tap in self.taps if first < tap <= end + (end == self.shape.num_layers)),
            )
            for name, first, end in spans
        )

    @property
    def exits(self) -> tuple[Exit, ...]:
        """One exit per border."""
        return tuple(
            Exit(
                name=names.exit_name(layer),
                file=names.stage_file(names.exit_name(layer)),
                layer=layer,
                num_candidates=self.num_candidates,
                adapter_rank=0 if adapter is None else adapter[0].shape[0],
            )
            for layer, adapter in self.adapters.items()
        )

    def entry(self, source: SourceModel, precision: str, storage: WeightStorage | None = None) -> TargetEntry:
        """What a manifest says of the target that is written by this plan."""
        return TargetEntry(
            source=source,
            shape=self.shape,
            precision=precision,
            context=self.context,
            segments=self.segments,
            exits=self.exits,
            weights_file=names.WEIGHTS_FILE,
            storage=storage,
            spare_rows=self.spare_rows,
            row_group=self.row_group,
        )

    @property
    def files(self) -> dict[str, str]:
        """Every stage's file by its name, in the order of export; those of heads are not among them."""
        return {stage.name: stage.file for stage in self.segments} | {stage.name: stage.file for stage in self.exits}


def write_target(
    model: WeightlessModel, plan: TargetPlan, bundle: Path, on_share: Callable[[str, float], None], journal: Journal
) -> None:
    """Export every stage of `model` into `bundle`; one tensor after the other is read, converted and written.

    Args:
        model: Opened in the dtype of the target's precision. Its attention implementation is changed for the export.
        plan: Sizes, borders and adapters.
        bundle: The bundle's folder.
        on_share: Told the stage at hand and the share of all bytes that is written, often.
        journal: Says what an earlier, killed export has written; it is kept.

    Raises:
        ExportError: there is not enough space for the weights.
    """
    (bundle / names.TARGET_FOLDER).mkdir(exist_ok=True)
    weights = Weights(model.lazy_weights)
    builders: dict[str, Callable[[], ir.Model]] = {
        **{stage.name: partial(segment_graph, model, weights, plan, stage) for stage in plan.segments},
        **{point.name: partial(exit_graph, model, weights, plan, point) for point in plan.exits},
        **{head.name: partial(head_graph, model, weights, plan, head) for head in plan.heads},
    }
    if plan.shape.recurrent is not None:
        builders[names.RECURRENCE] = partial(recurrence_graph, model, weights, plan)
    graphs = {}
    for name, build in builders.items():
        if journal.get(name) is None:
            on_share(f"the graph of {name}", 0.0)
            graphs[name] = build()
    with WeightsFile(bundle / names.WEIGHTS_FILE, journal.get(WEIGHTS)) as file:
        writing = _Writing(file, journal, file.missing_bytes(graphs.values()), on_share)
        check_space(bundle, writing.total)
        for name, graph in graphs.items():
            writing.write(name, graph, bundle / names.stage_file(name))


@dataclass(slots=True)
class _Writing:
    """Stages on their way to disk: how many of the bytes are written, and how many of them the journal knows."""

    weights: WeightsFile
    journal: Journal
    total: int
    on_share: Callable[[str, float], None]
    written: int = 0
    recorded: int = 0

    def write(self, name: str, graph: ir.Model, path: Path) -> None:
        """Write one stage; what a kill may cost is limited to `_RECORD_EVERY` bytes."""
        for num_bytes in self.weights.move_weights(graph):
            self.written += num_bytes
            if self.written - self.recorded >= _RECORD_EVERY:
                self._record()
            self.on_share(name, min(1.0, self.written / max(1, self.total)))
        ir.save(graph, path)
        flush_to_disk(path)
        self._record()
        self.journal.record(name, True)

    def _record(self) -> None:
        self.journal.record(WEIGHTS, self.weights.flushed())
        self.recorded = self.written


def segment_graph(model: WeightlessModel, weights: Weights, plan: TargetPlan, segment: Segment) -> ir.Model:
    """Export one segment; a segment over all layers is the whole target as one graph."""
    model.network.set_attn_implementation(GQA_ATTENTION)
    span = {"first_layer": segment.first_layer, "end_layer": segment.end_layer}
    contract = segment_contract(plan.shape, segment.name, taps=segment.taps, **span)
    stage = SegmentStage(
        parts_of(model.network),
        contract,
        context=plan.context,
        capacity=plan.capacity,
        spare_rows=plan.spare_rows,
        num_rescored=plan.formats.num_rescored,
        **span,
    )
    graph = export_stage(stage, contract, weights)
    vocab_size, has_spare_rows = plan.shape.vocab_size, plan.spare_rows > 0
    return optimise_stage(graph, plan.formats, vocab_size, plan.choose_pack, has_spare_rows=has_spare_rows)


def recurrence_graph(model: WeightlessModel, weights: Weights, plan: TargetPlan) -> ir.Model:
    """Export what runs the states of recurrent layers over accepted rows."""
    contract = recurrence_contract(plan.shape)
    stage = RecurrenceStage(parts_of(model.network), contract)
    graph = export_stage(stage, contract, weights)
    return optimise_stage(graph, plan.formats, plan.shape.vocab_size, plan.choose_pack)


def exit_graph(model: WeightlessModel, weights: Weights, plan: TargetPlan, point: Exit) -> ir.Model:
    """Export one exit; its adapter is stored like the head, what else it has as in the suffix.

    Its own logits are those of the scan, if there is one.
    """
    contract = exit_contract(plan.shape, point.name, num_candidates=plan.num_candidates)
    stage = ExitStage(parts_of(model.network), plan.num_candidates, plan.adapters[point.layer])
    graph = export_stage(stage, contract, weights)
    shared = {name: layer for name in plan.formats.inputs if (layer := plan.formats.of_layer(name)) is not None}
    formats = replace(plan.formats, layers=plan.formats.in_blocks.head, finer={**plan.formats.finer, **shared})
    return optimise_stage(graph, formats, plan.shape.vocab_size, plan.choose_pack)


def head_graph(model: WeightlessModel, weights: Weights, plan: TargetPlan, head: HeadCheckpoint) -> ir.Model:
    """Export one drafting head; its weights are stored like the LM head, and what it borrows is the target's own."""
    contract = head_contract(plan.shape, head.shape, head.name)
    network = head.network(model.network, getattr(torch, plan.shape.dtype))
    stage = HeadStage(network, contract, head.shape)
    graph = export_stage(stage, contract, weights)
    borrowed = lent_by(model.network, network).items()
    layers = [parameter for name, parameter in borrowed if name.startswith("layers.")]
    lent = {name: plan.formats.of_layer(name) for name in (model.stored[id(parameter)].name for parameter in layers)}
    return optimise_head(graph, replace(plan.formats, scan=None), plan.shape.vocab_size, plan.choose_pack, lent)
