"""The contracts between exporter and runtime: stage inputs and outputs, names, the bundle manifest, the errors."""

from mirrorsd.graphs.contract import (
    DraftShape,
    HeadShape,
    StageContract,
    TargetShape,
    TensorSpec,
    draft_contract,
    exit_contract,
    head_contract,
    segment_contract,
)
from mirrorsd.graphs.manifest import Manifest

__all__ = [
    "DraftShape",
    "HeadShape",
    "Manifest",
    "StageContract",
    "TargetShape",
    "TensorSpec",
    "draft_contract",
    "exit_contract",
    "head_contract",
    "segment_contract",
]
