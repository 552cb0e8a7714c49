"""An ordinary draft with its weights in blocks of four bits: one ONNX graph for ONNX Runtime on a processor.

Owns: which weights become blocks, and the files. Does not own: the packing (`passes/quantise`).
"""

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from mirrorsd.export.passes.graph_edits import add_tensor
from mirrorsd.export.passes.graph_passes import FuseSkipNorm
from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.passes.rotary import FuseRotary
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.export.weights.lazy_weight import lazy_weight
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import ConfigError

_EMBEDDING = BlockChoice(bits=8, block_size=64)
"""The rows of few tokens are looked up: their bits cost no time."""


def check_ordinary(shape: DraftShape) -> None:
    """Refuse a draft that has more than its own layers and head.

    Raises:
        ConfigError: it has streams, or its target's embedding.
    """
    if shape.num_streams or shape.row_width:
        found = "streams" if shape.num_streams else "its target's embedding"
        raise ConfigError(f"int4-blocks are for ordinary drafts; this one has {found}. Choose int8 or int4")


def write_draft_in_blocks(model: ir.Model, vocab_size: int, path: Path, block_size: int) -> None:
    """Write the exported draft (which is used up) to `path`, and the weights to the `.bin` beside it.

    Args:
        model: The draft as ONNX, with weights in floats.
        vocab_size: Rows of its embedding.
        path: Where to write; the folder exists.
        block_size: Weights that share a scale.
    """
    blocks = BlockChoice(bits=4, block_size=block_size)
    _unfold_head(model.graph)
    for graph_pass in (
        FuseRotary(),
        FuseSkipNorm(),
        common.RemoveUnusedNodesPass(),
        QuantiseWeights(WeightFormats(layers=blocks, head=blocks, embedding=_EMBEDDING), vocab_size),
        common.RemoveUnusedNodesPass(),
    ):
        graph_pass(model)
    ir.save(model, path, external_data=path.with_suffix(".bin").name)


def _unfold_head(graph: ir.Graph) -> None:
    """Have the head multiply with a weight of its own: the draft's stage cuts and turns the embedding."""
    for node in list(graph):
        turned = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if turned is None or turned.op_type != "Transpose":
            continue
        weight, cut = turned.inputs[0], None
        if weight is not None and weight.const_value is None:
            cut = weight.producer()
            weight = cut.inputs[0] if cut is not None and cut.op_type in ("Slice", "Identity") else None
        if weight is None or weight.const_value is None:
            continue
        own = lazy_weight(weight.const_value).transposed()
        node.replace_input_with(1, add_tensor(graph, own.key, own))
