"""Make prompts of the six tasks that the pair is measured at, from the corpus alone.

    python task_prompts.py CORPUS PROMPTS.jsonl --count 18000

The documents of the mix give too few different prompts of some kinds: a draft that sees the same ones again and again
learns its target's answers by heart. Here passages of every book and tale become questions, summaries and beginnings
of stories; nothing that is held back is used. `mirrorsd train text --corpus PROMPTS.jsonl` lets the target answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import typer
from corpus_mix import (
    GO_ON_REQUESTS,
    LEFT_OUT,
    STORY_REQUESTS,
    SUMMARY_REQUESTS,
    clean,
    read_documents,
    sentences,
    slug,
)
from read_corpus import is_held_back, read_set
from sums import make_sum

#: Questions about a passage that names somebody; `{}` is the name.
QUESTIONS = (
    "What did {} do?",
    "Where did {} go?",
    "Why did {} say that?",
    "How did {} feel?",
    "What did {} see?",
    "Who was {}?",
    "What happened to {}?",
    "What will {} do next?",
)
WHO = re.compile(r"\b((?:a|an|the) (?:[a-z]+ ){1,2}(?:who|that|which) (?:[a-z']+ ){1,6}[a-z']+)[.,;]")
TWO = re.compile(r"\b((?:a|the|his|her) (?:[a-z]+ )?[a-z]+ and (?:a|the|his|her) [a-z]+)\b")
NAME = re.compile(r"(?<=[a-z,] )(?:the (?:king|queen|prince|princess|wolf|fox|girl|boy|man|woman)|[A-Z][a-z]{2,})\b")

Prompt = list[tuple[str, str]]


class Passages:
    """Runs of sentences from the tales and books that may be trained on."""

    def __init__(self, corpus: Path, rng: random.Random) -> None:
        self._rng = rng
        tales = [
            record["text"] for record in read_set(corpus, "fairy_tales") if not is_held_back(slug(record["title"]))
        ]
        books = [
            record["text"]
            for number, record in enumerate(read_set(corpus, "children_books"))
            if record["title"] not in LEFT_OUT and not is_held_back(f"{record['title']} {number}")
        ]
        self._texts = [[sentences(clean(text)) for text in texts] for texts in (tales, books)]
        flat = " ".join(sentence for text in self._texts[0] for sentence in text)
        self.subjects = sorted({*WHO.findall(flat), *TWO.findall(flat)})

    def draw(self, fewest: int, most: int, longest: int = 900) -> str:
        """Draw a run of sentences (tales as often as books), `longest` characters at most."""
        while True:
            text = self._rng.choice(self._rng.choice(self._texts))
            start = self._rng.randrange(len(text))
            passage = " ".join(text[start : start + self._rng.randint(fewest, most)])
            if 20 < len(passage) <= longest:
                return passage


def make_prompts(corpus: Path, rng: random.Random) -> Iterator[Prompt]:
    """Yield prompts without end, the six tasks by turns."""
    passages = Passages(corpus, rng)
    kinds = ("fairy_tale_qa", "math", "dialogues", "short_qa", "instructions")
    known = {
        kind: [document.turns for document in read_documents(corpus, kind, rng) if not document.is_held_back]
        for kind in kinds
    }

    def story() -> Prompt:
        if rng.random() < 0.5:
            return [("user", rng.choice(STORY_REQUESTS).format(rng.choice(passages.subjects)))]
        return [("user", rng.choice(GO_ON_REQUESTS).format(passages.draw(1, 3)))]

    def question() -> Prompt:
        if rng.random() < 0.4:
            return _before_answer(rng.choice(known["fairy_tale_qa"]), rng)
        passage = passages.draw(3, 8)
        names = NAME.findall(passage)
        return [("user", f"{passage}\n\n{rng.choice(QUESTIONS).format(rng.choice(names or ['he', 'she']))}")]

    def summary() -> Prompt:
        return [("user", rng.choice(SUMMARY_REQUESTS).format(passages.draw(4, 9)))]

    def dialogue() -> Prompt:
        return _before_answer(rng.choice(known["dialogues"]), rng)

    def sums() -> Prompt:
        if rng.random() < 0.5:
            return _before_answer(rng.choice(known["math"]), rng)
        (first, answer), (second, _) = make_sum(rng), make_sum(rng)
        return [("user", first), *rng.choice(([], [("assistant", answer), ("user", second)]))]

    def instruction() -> Prompt:
        return _before_answer(rng.choice(known[rng.choice(("short_qa", "instructions"))]), rng)

    tasks: tuple[Callable[[], Prompt], ...] = (story, question, summary, dialogue, sums, instruction)
    while True:
        yield from (task() for task in tasks)


def _before_answer(turns: Prompt, rng: random.Random) -> Prompt:
    """Cut a conversation before one of its answers."""
    roles = [role for role, _ in turns]
    answers = [place for place, pair in enumerate(pairwise(roles), start=1) if pair == ("user", "assistant")]
    return turns[: rng.choice(answers)]


def main(corpus: Path, out: Path, count: int = 18000, seed: int = 20) -> None:
    """Write `count` different prompts as conversations that end with the user's turn."""
    lines: dict[str, None] = {}
    for prompt in make_prompts(corpus, random.Random(seed)):
        if len(lines) == count:
            break
        lines[json.dumps({"messages": [{"role": role, "content": text} for role, text in prompt]})] = None
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
