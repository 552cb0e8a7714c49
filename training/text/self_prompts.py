"""Cut documents into prompts for the target to continue.

Owns: where a document is cut. A conversation is cut after one of its user's turns, a text anywhere near its beginning.
Does not own: generation (`self_text.py`), reading files (`corpus.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirrorsd.families.tokenizers import load_tokenizer
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.text.corpus import Document

__all__ = ["PromptRules", "chat_prompt", "cut_prompts", "load_tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How prompts are cut.

    Attributes:
        shortest: Fewest tokens of a plain text's beginning.
        longest: Most tokens of any prompt; a plain text is cut within the first third of that.
    """

    shortest: int = 6
    longest: int = 300


def cut_prompts(
    documents: Sequence[Document], tokenizer: Any, count: int, seed: int, rules: PromptRules | None = None
) -> list[list[int]]:
    """Return up to `count` different prompts in random order: token ids, special tokens of the beginning included.

    Documents are gone through once in random order, then again with other cuts, until there are enough.

    Raises:
        ConfigError: No document is long enough for a prompt, or short enough.
    """
    rules = rules or PromptRules()
    rng = np.random.default_rng(seed)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for _ in range(8):
        for number in rng.permutation(len(documents)):
            if len(prompts) == count:
                return list(prompts.values())
            prompt = _cut(documents[number], tokenizer, rules, rng)
            if prompt is not None:
                prompts[tuple(prompt)] = prompt
    if not prompts:
        raise ConfigError(
            f"none of {len(documents)} documents gives a prompt: a text needs more than {rules.shortest} tokens, "
            f"a conversation a user's turn within the first {rules.longest}"
        )
    return list(prompts.values())


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]], *, is_asked: bool = True) -> list[int]:
    """Return the token ids of a conversation, up to where the assistant speaks if it `is_asked` to.

    Raises:
        ConfigError: The target has no chat template, or it takes no such conversation.
    """
    try:
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=is_asked)["input_ids"])
    except Exception as error:  # a program that came with the checkpoint may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the target's chat template does not take a conversation of {roles} ({error}); give conversations that "
            "it takes, or texts"
        ) from error


def _cut(document: Document, tokenizer: Any, rules: PromptRules, rng: np.random.Generator) -> list[int] | None:
    if document.messages:
        ends = [place for place, message in enumerate(document.messages, start=1) if message["role"] == "user"]
        if not ends:
            return None
        prompt = chat_prompt(tokenizer, document.messages[: rng.choice(ends)])
        return prompt if len(prompt) <= rules.longest else None
    ids = list(tokenizer(document.text, truncation=True, max_length=rules.longest)["input_ids"])
    longest = min(rules.longest // 3, len(ids) - 1)
    if longest < rules.shortest:
        return None
    return ids[: rng.integers(rules.shortest, longest + 1)]
