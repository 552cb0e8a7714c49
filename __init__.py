"""Mirror speculative decoding for ordinary PCs: export a pair of language models, run it on two devices."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mirrorsd.runtime import GenerationConfig, GenerationResult, MirrorPipeline

__version__ = "0.1.0"
__all__ = ["GenerationConfig", "GenerationResult", "MirrorPipeline", "__version__"]


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that ``import mirrorsd`` stays fast."""
    if name in ("GenerationConfig", "GenerationResult", "MirrorPipeline"):
        return getattr(import_module("mirrorsd.runtime"), name)
    raise AttributeError(f"module 'mirrorsd' has no attribute {name!r}")
