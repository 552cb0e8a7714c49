"""Cut documents into prompts for the target to continue.

Owns: where a document is cut. A conversation is cut after an assistant mark, a plain text anywhere near its beginning.
Does not own: generation (`self_text.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PromptRules", "cut_prompts", "split_documents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How prompts are cut.

    Attributes:
        bos: Token that begins every document.
        assistant: Token after which the assistant speaks.
        shortest: Fewest tokens of a plain text's beginning.
        longest: Most tokens of any prompt; longer conversations are skipped.
    """

    bos: int
    assistant: int
    shortest: int = 6
    longest: int = 300


def split_documents(stream: NDArray[np.uint16], bos: int) -> list[NDArray[np.uint16]]:
    """Split a token stream before every `bos`.

    >>> [part.tolist() for part in split_documents(np.array([1, 5, 1, 6, 7], np.uint16), bos=1)]
    [[1, 5], [1, 6, 7]]
    """
    borders = np.flatnonzero(stream == bos)
    return [part for part in np.split(stream, borders[borders > 0]) if len(part)]


def cut_prompts(stream: NDArray[np.uint16], rules: PromptRules, count: int, seed: int) -> list[list[int]]:
    """Return up to `count` different prompts from the documents of `stream`, in random order."""
    rng = np.random.default_rng(seed)
    documents = split_documents(stream, rules.bos)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for number in rng.permutation(len(documents)):
        if len(prompts) == count:
            break
        prompt = _cut(documents[number], rules, rng)
        if prompt is not None:
            prompts[tuple(prompt)] = prompt
    return list(prompts.values())


def _cut(document: NDArray[np.uint16], rules: PromptRules, rng: np.random.Generator) -> list[int] | None:
    marks = np.flatnonzero(document == rules.assistant) + 1
    if len(marks):
        marks = marks[marks <= rules.longest]
        return [int(token) for token in document[: rng.choice(marks)]] if len(marks) else None
    longest = min(rules.longest // 3, len(document) - 1)
    if longest < rules.shortest:
        return None
    return [int(token) for token in document[: rng.integers(rules.shortest, longest + 1)]]
