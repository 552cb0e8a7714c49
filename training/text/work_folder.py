"""What a training reads of its work folders: text that the target wrote, mixed with documents.

Owns: which folders are read, and that loops are left out. Does not own: files (`text_folder.py`).
"""

from __future__ import annotations

from pathlib import Path

from mirrorsd.training.text import TEXT_FOLDER
from mirrorsd.training.text.self_text import cut_before_loop
from mirrorsd.training.text.text_folder import join_texts, load_texts, mark_own
from mirrorsd.training.text.token_stream import MixedStream, TokenStream

_LOOP_TOKENS = 24


def open_text(*folders: Path) -> TokenStream:
    """Read what the target wrote, the greater part of its loops left out: they teach nothing new."""
    texts = [cut_before_loop(text, keep=_LOOP_TOKENS) for folder in folders for text in load_texts(folder)]
    return TokenStream(join_texts(texts), mark_own(texts))


def training_text(works: list[Path], documents: TokenStream | None, share: float) -> TokenStream | MixedStream:
    """What the target wrote in these work folders, mixed with `share` of documents if there are any.

    The first folder may hold none of its own beside others.
    """
    if documents is not None and share == 1:
        return documents
    folders = [work / TEXT_FOLDER for work in works]
    text = open_text(*(folders if folders[0].is_dir() else folders[1:] or folders))
    return text if documents is None else MixedStream(text, documents, share)
