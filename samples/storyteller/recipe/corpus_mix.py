"""Turn the corpus into documents: stories, and conversations about them.

Owns: which sets are read, how a record becomes text, and how many tokens each kind may fill.
Does not own: reading files (`read_corpus.py`), tokens (`build_corpus.py`).

A document is a list of `(role, text)`; the role `text` marks a plain document.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from read_corpus import is_held_back, read_set
from sums import make_sum

Turns = list[tuple[str, str]]

#: Tokens (millions) that each kind fills in the training mix; a kind that is too short is repeated.
TOKEN_BUDGET = {
    "fairy_tales": 1.7,
    "children_books": 5.0,
    "story_chats": 1.1,
    "fairy_tale_qa": 1.7,
    "summaries": 0.6,
    "math": 0.9,
    "sums": 0.45,
    "dialogues": 0.4,
    "short_qa": 0.25,
    "instructions": 0.3,
    "python_code": 0.3,
}

#: Children's books whose language is too far from a simple story.
LEFT_OUT = frozenset(
    {
        "Bulfinch's Mythology",
        "Kim",
        "A Lady Of Quality",
        "Gitanjali",
        "With the Night Mail",
        "As Easy as A.B.C.",
        "The Man Who Would Be King",
        "Hospital Sketches",
        "Phantastes",
    }
)

STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Please tell me the tale of {}.",
    "I would like to hear a story about {}.",
    "Write a fairy tale about {}.",
)
GO_ON_REQUESTS = ("Go on with this story: {}", "What happens next? {}", "Continue the story: {}")
SUMMARY_REQUESTS = ("Summarize this: {}", "Tell me in short what this says: {}", "Give me a short summary. {}")


class Document(NamedTuple):
    """One training text: its kind, its turns, and whether it is held back for validation."""

    kind: str
    turns: Turns
    is_held_back: bool


def read_documents(corpus: Path, kind: str, rng: random.Random) -> Iterator[Document]:
    """Yield every document of one kind (a key of `TOKEN_BUDGET`)."""
    for key, turns in _READERS[kind](corpus, rng):
        yield Document(kind, turns, is_held_back(key))


def clean(text: str) -> str:
    r"""Undo hard line wraps and Markdown marks; keep the paragraphs.

    >>> clean("Once upon\na time.\n\n_So_ it was.")
    'Once upon a time.\n\nSo it was.'
    """
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    text = "\n\n".join(part.lstrip("#").strip() for part in paragraphs if part)
    return (
        text.replace("_", "")
        .replace("\u2019", "'")
        .replace("\u201c", '"')
        .replace("\u201d", '"')
        .replace("\u2014", "--")
    )


def slug(title: str) -> str:
    """Name a story the same way in every set."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def cut(text: str, rng: random.Random, *, shortest: int = 1000, longest: int = 3600) -> Iterator[str]:
    """Cut a long text at paragraph borders into pieces of a random length (characters)."""
    piece: list[str] = []
    limit = rng.randint(shortest, longest)
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        if sum(map(len, piece)) >= limit:
            yield "\n\n".join(piece)
            piece, limit = [], rng.randint(shortest, longest)
    if piece:
        yield "\n\n".join(piece)


def sentences(text: str) -> list[str]:
    """Split into sentences, roughly."""
    return [
        part.strip() for part in re.split(r"(?<=[.!?])[\"']?\s+(?=[\"'A-Z])", text.replace("\n\n", " ")) if part.strip()
    ]


def extract_summary(text: str) -> str:
    """Shorten by extraction: the first sentence, and the one that shares most words with the others."""
    first, *rest = sentences(text)
    if not rest:
        return first
    words = [set(re.findall(r"[a-z]{4,}", sentence.lower())) for sentence in rest]
    scores = [sum(len(own & other) for other in words) / (8 + len(own)) for own in words]
    return f"{first} {rest[scores.index(max(scores))]}"


def _fairy_tales(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "fairy_tales"):
        for piece in cut(clean(record["text"]), rng):
            yield slug(record["title"]), [("text", piece)]


def _children_books(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for number, record in enumerate(read_set(corpus, "children_books")):
        if record["title"] not in LEFT_OUT:
            for piece in cut(clean(record["text"]), rng):
                yield f"{record['title']} {number}", [("text", piece)]


def _story_chats(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "fairy_tales"):
        text, title = clean(record["text"]), record["title"].replace("-", " ").strip().lower()
        pieces = list(cut(text, rng, shortest=500, longest=1600))
        yield slug(record["title"]), [("user", rng.choice(STORY_REQUESTS).format(title)), ("assistant", pieces[0])]
        for begin, following in zip(pieces[::2], pieces[1::2], strict=False):
            request = rng.choice(GO_ON_REQUESTS).format(" ".join(sentences(begin)[-rng.randint(1, 4) :]))
            yield slug(record["title"]), [("user", request), ("assistant", following)]


def _fairy_tale_qa(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    asked: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for record in read_set(corpus, "fairy_tale_qa"):
        context = clean(record["context"])
        if len(context) <= 1500:
            asked.setdefault((record["story"], context), []).append(
                (record["question"].strip(), record["answer"].strip())
            )
    for (story, context), pairs in asked.items():
        rng.shuffle(pairs)
        for start in range(0, len(pairs), 3):
            turns: Turns = []
            for question, answer in pairs[start : start + 3]:
                turns += [
                    ("user", question if turns else f"{context}\n\n{question}"),
                    ("assistant", answer[:1].upper() + answer[1:]),
                ]
            yield slug(story), turns


def _summaries(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "fairy_tales"):
        for piece in cut(clean(record["text"]), rng, shortest=300, longest=900):
            if len(sentences(piece)) >= 4:
                request = rng.choice(SUMMARY_REQUESTS).format(piece[:1400])
                yield slug(record["title"]), [("user", request), ("assistant", extract_summary(piece[:1400]))]


def _math(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "math"):
        answer = re.sub(r"<<[^>]*>>", "", record["answer"]).replace("#### ", "The answer is ").strip()
        yield record["question"], [("user", record["question"].strip()), ("assistant", answer + ".")]


def _sums(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for _ in range(9000):
        turns: Turns = []
        for _ in range(rng.randint(1, 3)):
            question, answer = make_sum(rng)
            turns += [("user", question), ("assistant", answer)]
        yield turns[0][1], turns


def _dialogues(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "dialogues"):
        turns = [(role, text.strip()) for role, text in record["turns"]]
        if turns and turns[0][0] == "user" and all(role in ("user", "assistant") for role, _ in turns):
            yield record["id"], turns


def _short_qa(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "short_qa"):
        if record["answers"]:
            question = record["question"].strip()
            yield (
                question,
                [("user", question[:1].upper() + question[1:]), ("assistant", ", ".join(record["answers"][:3]) + ".")],
            )


def _instructions(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "instructions"):
        request = f"{record['instruction']}\n\n{record['input']}".strip()
        yield request, [("user", request), ("assistant", record["output"].strip())]


def _python_code(corpus: Path, rng: random.Random) -> Iterator[tuple[str, Turns]]:
    for record in read_set(corpus, "python_code"):
        if 200 < len(record["text"]) < 2000:
            yield f"{record['repo']}/{record['path']}", [("text", record["text"].strip())]


_READERS = {
    "fairy_tales": _fairy_tales,
    "children_books": _children_books,
    "story_chats": _story_chats,
    "fairy_tale_qa": _fairy_tale_qa,
    "summaries": _summaries,
    "math": _math,
    "sums": _sums,
    "dialogues": _dialogues,
    "short_qa": _short_qa,
    "instructions": _instructions,
    "python_code": _python_code,
}
