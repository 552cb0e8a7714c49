"""How much of its weights a stage reads when it runs: what its time is made of where a device waits for its memory."""

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from mirrorsd.export.passes.experts import EXPERT
from mirrorsd.graphs.manifest import Head, TargetEntry

_LOOK_UPS = ("Gather", "GatherBlockQuantized", "GatherElements", "GroupQueryAttention", "RotaryEmbedding")
"""They read some rows of their tables, not all."""


def read_bytes(stage: Path, active_share: float = 1.0) -> int:
    """Bytes of the weights that the nodes of a written stage read; a weight that two nodes read counts twice.

    Of a mixture's experts a row has `active_share`.
    """
    graph = ir.load(stage).graph
    total = sum(
        value.const_value.nbytes * (active_share if EXPERT in (node.name or "") else 1)
        for node in graph.all_nodes()
        if node.op_type not in _LOOK_UPS
        for value in node.inputs
        if value is not None and value.is_initializer() and value.const_value is not None
    )
    return round(total)


def with_costs(target: TargetEntry, heads: tuple[Head, ...], bundle: Path) -> tuple[TargetEntry, tuple[Head, ...]]:
    """The entries of a written target and its heads, with what a pass of one row and each head's run read."""
    shape = target.shape
    active_share = shape.num_active / shape.num_experts if shape.num_experts else 1.0
    per_pass = sum(read_bytes(bundle / segment.file, active_share) for segment in target.segments)
    shares = [read_bytes(bundle / head.file) / per_pass for head in heads]
    costed = tuple(replace(head, read_share=round(share, 5)) for head, share in zip(heads, shares, strict=True))
    return replace(target, read_bytes=per_pass), costed
