"""Of which architectures GGUF files are read.

Owns: the list: families of ours that transformers' reader and the `gguf` package know. Does not own: reading
(`gguf_file.py`), why a family is not supported (`families.registry`).
"""

import re
from pathlib import Path

from mirrorsd.families.registry import FAMILIES
from mirrorsd.graphs.errors import ExportError

_NO_ARCHITECTURES = ("general", "tokenizer")
"""Groups of fields, which transformers lists among them."""
_OF_A_TEXT_PART = "_text"


def readable_architectures() -> list[str]:
    """What files call the architectures that are read; Mistral's files say "llama"."""
    from gguf import MODEL_ARCH_NAMES

    named = {_plain(name): name for name in MODEL_ARCH_NAMES.values()}
    ours = {
        _plain(family.model_type.removesuffix(_OF_A_TEXT_PART))
        for family in FAMILIES.values()
        if family.mixture is None or not family.mixture.is_turned
    }
    return sorted(named[name] for name in ours & named.keys() & _known_to_transformers())


def check_architecture(file: Path, architecture: str | None) -> None:
    """Refuse a file whose architecture transformers cannot read; a family that is none of ours has its own words.

    Raises:
        ExportError: the message names the architectures that are read.
    """
    if _plain(architecture or "") not in _known_to_transformers():
        raise ExportError(
            f"{file} has the architecture {architecture!r}, which is not read from GGUF files; read are "
            f"{', '.join(readable_architectures())}. Export the model's Hugging Face folder instead"
        )


def _known_to_transformers() -> set[str]:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return {_plain(name) for name in GGUF_SUPPORTED_ARCHITECTURES if name not in _NO_ARCHITECTURES}


def _plain(architecture: str) -> str:
    """Files call "qwen3moe" and "gpt-oss" what transformers calls "qwen3_moe" and "gpt_oss"."""
    return re.sub("[-_]", "", architecture)
