"""Documents as one long row of tokens, for a draft that also learns on text that the target did not write.

Owns: how a document becomes tokens, and their order. Does not own: reading files (`corpus.py`), prompts cut from them
(`self_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd.training.text.corpus import Document
from mirrorsd.training.text.self_prompts import chat_prompt
from mirrorsd.training.text.text_folder import pack_tokens

__all__ = ["document_tokens"]

_BATCH = 512


def document_tokens(
    documents: Sequence[Document], tokenizer: Any, end: int, seed: int = 0
) -> NDArray[np.uint16 | np.uint32]:
    """Return whole documents as one row of token ids, in random order.

    A conversation goes through the tokenizer's chat template; a plain text is followed by `end`.
    """
    shuffled = [documents[number] for number in np.random.default_rng(seed).permutation(len(documents))]
    return pack_tokens(
        [
            ids
            for start in range(0, len(shuffled), _BATCH)
            for ids in _encode(shuffled[start : start + _BATCH], tokenizer, end)
        ]
    )


def _encode(documents: Sequence[Document], tokenizer: Any, end: int) -> Iterator[list[int]]:
    texts = [document.text for document in documents if not document.messages]
    plain = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
    for document in documents:
        if document.messages:
            yield chat_prompt(tokenizer, document.messages, is_asked=False)
        else:
            yield [*next(plain), end]
