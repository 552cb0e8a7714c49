"""Drafting heads: small networks that read the target's hidden states (Medusa, Hydra, EAGLE-3, blocks, streams)."""

from .block import BlockNetwork
from .chain import HeadChain
from .config import KINDS, HeadConfig
from .eagle3 import Eagle3Network
from .hydra import HydraNetwork
from .medusa import MedusaNetwork
from .network import HeadNetwork
from .streaming import StreamingNetwork

__all__ = ["KINDS", "HeadChain", "HeadConfig", "HeadNetwork", "build_head"]

_NETWORKS: dict[str, type[HeadNetwork]] = {
    "medusa": MedusaNetwork,
    "hydra": HydraNetwork,
    "eagle3": Eagle3Network,
    "block": BlockNetwork,
    "streaming": StreamingNetwork,
    "mtp": Eagle3Network,
}


def build_head(config: HeadConfig) -> HeadNetwork:
    """Return an untrained head; the tensors that it borrows (`config.borrowed`) are random until they are loaded."""
    return _NETWORKS[config.head_kind](config)
