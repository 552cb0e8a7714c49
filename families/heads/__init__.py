"""Drafting heads: small networks that read the target's hidden states. Their kinds are files of `kinds/`."""

from . import kinds
from .chain import HeadChain
from .config import HeadConfig
from .kind import KINDS, HeadKind
from .network import HeadNetwork

__all__ = ["KINDS", "HeadChain", "HeadConfig", "HeadKind", "HeadNetwork", "build_head", "kinds"]


def build_head(config: HeadConfig) -> HeadNetwork:
    """Return an untrained head; the tensors that it borrows (`config.borrowed`) are random until they are loaded."""
    network: HeadNetwork = config.kind.network(config)
    return network
