"""How a chat is sampled where neither its reader nor its checkpoint says so.

A small model that is decoded greedily says one sentence again and again; chats are sampled for that. Owns: the values,
and who published them. Does not own: what a request leaves open (`Manifest.chat_settings`), which commands are chats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
CHECKPOINT, BUILT_IN = "checkpoint", "built-in"


class Published(NamedTuple):
    """What a family's makers recommend, and where they say so."""

    sampling: Mapping[str, Any]
    source: str


_HUB = "https://huggingface.co"
FAMILIES: Mapping[str, Published] = MappingProxyType(
    {
        "qwen2": Published(
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            f"{_HUB}/Qwen/Qwen2.5-1.5B-Instruct/blob/main/generation_config.json",
        ),
        "qwen3": Published(
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            f"{_HUB}/Qwen/Qwen3-0.6B/blob/main/generation_config.json",
        ),
        "smollm3": Published(
            {"temperature": 0.6, "top_p": 0.95}, f"{_HUB}/HuggingFaceTB/SmolLM3-3B/blob/main/README.md"
        ),
        "gemma3_text": Published(
            {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
            f"{_HUB}/google/gemma-3-1b-it/blob/main/generation_config.json",
        ),
    }
)
"""By `model_type`, where a family's chat models share the values. Llama's type is that of many makers' models."""
ORDINARY: Mapping[str, Any] = MappingProxyType({"temperature": 0.8, "top_p": 0.95, "min_p": 0.05})
"""For all others: `bench/claims/chat_loops.py` counts what loops with it, and greedily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDefaults:
    """Fields of `GenerationConfig` for a chat that leaves them open, and whose they are.

    Attributes:
        generation: with `do_sample`, temperature and filters, and what else the checkpoint names.
        source: "checkpoint", "built-in", or a family's name and an address ("qwen3: https://...").
    """

    generation: dict[str, Any]
    source: str


def chat_defaults(family: str, generation: Mapping[str, Any]) -> ChatDefaults:
    """What a chat takes: the checkpoint's own where it says whether to sample, else its family's, else the ordinary.

    Args:
        family: the model's `model_type`.
        generation: what its `generation_config.json` names. Single fields of it stand in either case.

    >>> chat_defaults("llama", {"top_k": 40}).generation
    {'do_sample': True, 'temperature': 0.8, 'top_p': 0.95, 'min_p': 0.05, 'top_k': 40}
    >>> chat_defaults("llama", {"do_sample": False})
    ChatDefaults(generation={'do_sample': False}, source='checkpoint')
    """
    if "do_sample" in generation or generation.get("temperature") == 0:
        return ChatDefaults(generation=dict(generation), source=CHECKPOINT)
    found = FAMILIES.get(family)
    values, source = (ORDINARY, BUILT_IN) if found is None else (found.sampling, f"{family}: {found.source}")
    return ChatDefaults(generation={"do_sample": True, **values, **generation}, source=source)
