"""The families of causal language models: which are supported, and where Hugging Face keeps the parts of each.

Both `mirrorsd.export` and `mirrorsd.training` build on these parts; neither imports the other.
"""

from .decoder_parts import DecoderParts
from .registry import FAMILIES, Family, find_obstacle, parts_of

__all__ = ["FAMILIES", "DecoderParts", "Family", "find_obstacle", "parts_of"]
