"""The draft's graph as one OpenVINO IR with symbolic rows, tips and capacity.

Owns: checkpoint -> ONNX -> IR, and the names of the IR's ports. Does not own: fewer bits (`draft_compression.py`),
compiling.
"""

from pathlib import Path

import onnx_ir as ir
import openvino as ov

from mirrorsd.devices.openvino.saved_graph import save_graph
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.loading import Streams
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.passes.graph_passes import optimise_draft
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
from mirrorsd.export.stages.attention import TREE_ATTENTION
from mirrorsd.export.stages.draft import DraftStage
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs.contract import DraftShape, StageContract, draft_contract


def draft_graph(
    checkpoint: Checkpoint, shape: DraftShape, streams: Streams | None, *, context: int, num_input_ids: int
) -> ir.Model:
    """The draft as ONNX, its weights in floats; they are read when the graph is written.

    Args:
        checkpoint: The draft's.
        shape: Of its passes.
        streams: Its stream embeddings, if any.
        context: Longest text.
        num_input_ids: Ids of the target, which the draft may be asked about.
    """
    model, contract = open_model(checkpoint), draft_contract(shape)
    model.network.set_attn_implementation(TREE_ATTENTION)
    stage = DraftStage(
        parts_of(model.network), contract, shape, streams=streams, context=context, num_input_ids=num_input_ids
    )
    return optimise_draft(export_stage(stage, contract, Weights(model.lazy_weights)))


def write_draft(model: ir.Model, contract: StageContract, xml_path: Path, precision: str) -> None:
    """Convert the exported draft to `xml_path` and the `.bin` beside it.

    Args:
        model: The draft as ONNX.
        contract: Its contract; the ports get exactly its names.
        xml_path: Where to write; the folder exists.
        precision: "fp32" or "fp16"; fewer bits are `draft_compression.py`'s.

    Raises:
        OSError: the disk has no room for both forms at once.
    """
    onnx_path = xml_path.with_suffix(".onnx")
    ir.save(model, onnx_path, external_data=f"{onnx_path.name}.data")
    try:
        converted = ov.convert_model(onnx_path)
        for port, spec in zip(
            (*converted.inputs, *converted.outputs), (*contract.inputs, *contract.outputs), strict=True
        ):
            port.get_tensor().set_names({spec.name})
        save_graph(converted, xml_path, in_fp16=precision == "fp16")
    finally:
        onnx_path.unlink(missing_ok=True)
        onnx_path.with_name(f"{onnx_path.name}.data").unlink(missing_ok=True)
