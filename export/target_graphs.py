"""The target's graphs in a bundle: which stages there are, and writing them around one weights file.

Owns: segments and exits as ONNX files. Does not own: the modules (`target_stages.py`), the passes (`graph_passes.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from torch import Tensor

from mirrorsd.families.registry import parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import TargetShape, exit_contract, segment_contract
from mirrorsd.graphs.manifest import Exit, Segment

from .attention import GQA_ATTENTION
from .graph_passes import optimise_stage
from .target_stages import ExitStage, SegmentStage
from .torch_to_onnx import export_stage
from .weightless import WeightlessModel
from .weights_file import WeightsFile

Adapter = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPlan:
    """Everything that decides the target's graphs; `adapters` is by exit layer, None for a plain exit."""

    shape: TargetShape
    context: int
    num_candidates: int
    adapters: dict[int, Adapter | None]
    precision: str = "fp32"

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The chain of segments with a border at every exit layer."""
        edges = (0, *self.adapters, self.shape.num_layers)
        spans = zip(names.segment_names(len(edges) - 1), edges, edges[1:], strict=False)
        return tuple(
            Segment(name=name, file=names.stage_file(name), first_layer=first, end_layer=end)
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

    @property
    def files(self) -> dict[str, str]:
        """Every stage's file by its name, in the order of export."""
        return {stage.name: stage.file for stage in self.segments} | {stage.name: stage.file for stage in self.exits}


def write_target(model: WeightlessModel, plan: TargetPlan, bundle: Path, on_stage: Callable[[str], None]) -> None:
    """Export every stage of `model` into `bundle`; one tensor after the other is read, converted and written.

    Args:
        model: Opened in the dtype of the target's precision. Its attention implementation is changed for the export.
        plan: Sizes, borders and adapters.
        bundle: The bundle's folder.
        on_stage: Called with the name of each stage before it is exported.
    """
    (bundle / names.TARGET_FOLDER).mkdir()
    with WeightsFile(bundle / names.WEIGHTS_FILE) as weights:
        for segment in plan.segments:
            on_stage(segment.name)
            graph = segment_graph(model, plan, segment)
            weights.move_weights(graph)
            ir.save(graph, bundle / segment.file)
        for point in plan.exits:
            on_stage(point.name)
            graph = exit_graph(model, plan, point)
            weights.move_weights(graph)
            ir.save(graph, bundle / point.file)


def segment_graph(model: WeightlessModel, plan: TargetPlan, segment: Segment) -> ir.Model:
    """Export one segment; a segment over all layers is the whole target as one graph."""
    model.network.set_attn_implementation(GQA_ATTENTION)
    span = {"first_layer": segment.first_layer, "end_layer": segment.end_layer}
    contract = segment_contract(plan.shape, segment.name, **span)
    stage = SegmentStage(parts_of(model.network), contract, context=plan.context, **span)
    return optimise_stage(
        export_stage(stage, contract, model.lazy_weights(stage)), plan.precision, plan.shape.vocab_size
    )


def exit_graph(model: WeightlessModel, plan: TargetPlan, point: Exit) -> ir.Model:
    """Export one exit."""
    contract = exit_contract(plan.shape, point.name, num_candidates=plan.num_candidates)
    stage = ExitStage(parts_of(model.network), plan.num_candidates, plan.adapters[point.layer])
    return optimise_stage(
        export_stage(stage, contract, model.lazy_weights(stage)), plan.precision, plan.shape.vocab_size
    )
