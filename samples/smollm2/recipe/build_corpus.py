"""Documents for a chat model's draft: everything that is a question and an answer becomes a conversation.

    python samples/smollm2/recipe/build_corpus.py CORPUS documents.jsonl

CORPUS holds `*.jsonl` or `*.jsonl.xz` files, one set each, in the fields of the table in the README beside this file.
What comes out is what `mirrorsd train --corpus` reads. Conversations get the chat template of the target there, so
the draft sees text in the form in which the target is asked. Long texts are cut into pieces of a few pages, in random
order, so that the first hour of a training has already seen every set.
"""

import argparse
import json
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PIECE = 6000
"""Characters of a piece of a long text: about 1,500 tokens."""
SEED = 7

Record = dict[str, Any]


def asked(question: str, answer: str) -> Record:
    """One question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pieces(text: str) -> Iterator[Record]:
    """A long text, cut at the ends of paragraphs."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > PIECE:
            yield {"text": piece}
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece.strip():
        yield {"text": piece}


def of_text(record: Record) -> Iterator[Record]:
    """Books and textbooks."""
    yield from pieces(record["text"])


def of_code(record: Record) -> Iterator[Record]:
    """A program, as the answer to its file's name."""
    yield asked(
        f"Write a Python program: {Path(record['path']).stem.replace('_', ' ')}.", f"```python\n{record['text']}```"
    )


def of_instruction(record: Record) -> Iterator[Record]:
    """An instruction, with what it is about below it."""
    yield asked("\n\n".join(part for part in (record["instruction"], record["input"]) if part), record["output"])


def of_sum(record: Record) -> Iterator[Record]:
    """A sum in words; marks of a calculator are left out."""
    answer = record["answer"]
    while "<<" in answer and ">>" in answer:
        before, _, rest = answer.partition("<<")
        answer = before + rest.partition(">>")[2]
    yield asked(record["question"], answer)


def of_short_question(record: Record) -> Iterator[Record]:
    """A question with one answer or several."""
    yield asked(record["question"], ", ".join(record["answers"]))


def of_tale_question(record: Record) -> Iterator[Record]:
    """A question about a piece of a tale, with the piece before it."""
    yield asked(f"{record['context']}\n\n{record['question']}", record["answer"])


def of_dialogue(record: Record) -> Iterator[Record]:
    """A conversation as it is."""
    yield {"messages": [{"role": role, "content": text} for role, text in record["turns"] if text]}


READERS: dict[str, Callable[[Record], Iterator[Record]]] = {
    "textbooks": of_text,
    "classic_books": of_text,
    "children_books": of_text,
    "fairy_tales": of_text,
    "python_code": of_code,
    "instructions": of_instruction,
    "math": of_sum,
    "short_qa": of_short_question,
    "fairy_tale_qa": of_tale_question,
    "dialogues": of_dialogue,
}


def read_set(path: Path) -> Iterator[Record]:
    """The documents of one file."""
    reader = READERS[path.name.split(".")[0]]
    whole = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    for line in whole.splitlines():
        yield from reader(json.loads(line))


def main() -> None:
    """Read every known set of a folder and write its documents in random order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="the folder of sets")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    given = parser.parse_args()
    paths = [path for path in sorted(given.corpus.glob("*.jsonl*")) if path.name.split(".")[0] in READERS]
    documents = [document for path in paths for document in read_set(path)]
    random.Random(SEED).shuffle(documents)
    with given.out.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    print(f"{len(documents)} documents of {len(paths)} sets in {given.out}")


if __name__ == "__main__":
    main()
