"""A checkpoint's tokenizer as it was meant: what transformers loads, with texts cut as the checkpoint's own file says.

Owns: the one way to load it, for exports and for training, and the texts by which two are compared.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

_NUM_TEXTS = 200
_FRAMES = ("*", " * ", "a*b", "* word", "word *", "**", "\n*\n", "\u00e9*\u65e5\u672c", "  *  ", "*.*")
_PLAIN = (
    "The lamp is lit.",
    "def f(x):\n    return x",
    "3.14159 \u00bd",
    "don't  stop\t",
    "Steps:\n\n1. 2026\n\n    22.5",
    "\u65e5\u672c\u8a9e \U0001f44b",
)
_HOW_TO_MERGE = ("ignore_merges", "byte_fallback", "fuse_unk")


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer beside a model's weights."""
    found: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    cut_as_in_file(found, folder)
    return found


def cut_as_in_file(theirs: Any, folder: Path) -> None:
    """Have texts cut as tokenizer.json says, with which the model was trained.

    Several of transformers 5's classes cut them in a way of their own (`GPT2Tokenizer`, `LlamaTokenizer`), whatever
    that file says. Where tokenizer_config.json asks for another way, theirs is right.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    given = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    if not file.is_file() or given.get("add_prefix_space"):
        return
    own, backend = Tokenizer.from_file(str(file)), theirs.backend_tokenizer
    texts = probe_texts(special_texts(theirs))
    before = [backend.encode(text).ids for text in texts]
    backend.normalizer, backend.pre_tokenizer = own.normalizer, own.pre_tokenizer
    backend.decoder = own.decoder or backend.decoder
    for name in _HOW_TO_MERGE:
        if hasattr(own.model, name):
            setattr(backend.model, name, getattr(own.model, name))
    if [backend.encode(text).ids for text in texts] != before:
        warnings.warn(
            f"{file} cuts texts otherwise than {type(theirs).__name__} of transformers, "
            "which reads it; the bundle follows the file",
            RuntimeWarning,
            stacklevel=2,
        )


def probe_texts(tokens: Sequence[str]) -> list[str]:
    """Make 200 texts that spell every one of the tokens in each of several surroundings."""
    spelt = [frame.replace("*", token) for frame in _FRAMES for token in tokens]
    return [f"{_PLAIN[place % len(_PLAIN)]} {place}" + "".join(spelt[place::_NUM_TEXTS]) for place in range(_NUM_TEXTS)]


def special_texts(theirs: Any) -> list[str]:
    """How every added and special token is written."""
    tokens = [token.content for token in theirs.added_tokens_decoder.values()]
    return list(dict.fromkeys([*tokens, *theirs.special_tokens_map.values(), *theirs.all_special_tokens]))
