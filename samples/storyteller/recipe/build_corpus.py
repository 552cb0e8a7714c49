"""Train the tokenizer and pack the mix into token files.

    python build_corpus.py CORPUS OUT

writes `OUT/tokenizer/` and `OUT/train.npy` (one long uint16 stream of shuffled documents), `OUT/held_back.npz` (one
stream per kind, never trained on), and the documents of both as `OUT/documents.jsonl` and `OUT/held_back.jsonl`, in the
form that `mirrorsd train --corpus` reads.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import typer
from corpus_mix import TOKEN_BUDGET, Document, read_documents
from story_tokenizer import render, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

#: Kinds that would otherwise fill the held-back prompts with one-line answers, and how many documents of each stay.
SHORT_KINDS = ("short_qa", "sums")
MOST_SHORT = 40


def fill_budget(streams: list[list[int]], budget: int, rng: random.Random) -> list[list[int]]:
    """Repeat shuffled documents until `budget` tokens are there."""
    chosen: list[list[int]] = []
    filled = 0
    while filled < budget:
        rng.shuffle(streams)
        for stream in streams:
            chosen.append(stream)
            filled += len(stream)
            if filled >= budget:
                break
    return chosen


def write_documents(path: Path, documents: list[Document]) -> None:
    """Write documents as texts and conversations, one JSON object per line."""
    lines = []
    for document in documents:
        (role, text), *_ = document.turns
        messages = [{"role": role, "content": text} for role, text in document.turns]
        lines.append(json.dumps({"text": text} if role == "text" else {"messages": messages}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Encode documents, special tokens included."""
    texts = [render(document.turns) for document in documents]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def main(corpus: Path, out: Path, seed: int = 20) -> None:
    """Build the token files."""
    rng = random.Random(seed)
    documents = {kind: list(read_documents(corpus, kind, rng)) for kind in TOKEN_BUDGET}
    train = {kind: [document for document in rows if not document.is_held_back] for kind, rows in documents.items()}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(
        [document for rows in train.values() for document in rng.sample(rows, min(len(rows), 6000))]
    )
    save_tokenizer(tokenizer, out / "tokenizer")
    mixed: list[list[int]] = []
    held_back: dict[str, np.ndarray] = {}
    for kind, millions in TOKEN_BUDGET.items():
        streams = encode(tokenizer, train[kind])
        mixed += fill_budget(streams, int(millions * 1e6), rng)
        held = encode(tokenizer, [document for document in documents[kind] if document.is_held_back])
        held_back[kind] = np.array([token for stream in held for token in stream], np.uint16)
        count, millions_there = len(train[kind]), sum(map(len, streams)) / 1e6
        print(f"{kind}: {count} documents, {millions_there:.2f} M tokens; held back {held_back[kind].size}")
    rng.shuffle(mixed)
    np.save(out / "train.npy", np.concatenate([np.array(stream, np.uint16) for stream in mixed]))
    np.savez(out / "held_back.npz", **held_back)
    write_documents(out / "documents.jsonl", [document for rows in train.values() for document in rows])
    held = {kind: [document for document in rows if document.is_held_back] for kind, rows in documents.items()}
    write_documents(
        out / "held_back.jsonl",
        [document for kind, rows in held.items() for document in rows[: MOST_SHORT if kind in SHORT_KINDS else None]],
    )


if __name__ == "__main__":
    typer.run(main)
