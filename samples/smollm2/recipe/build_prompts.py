"""Requests as people make them, for the target to answer: what a chat model's draft has to learn most.

    python samples/smollm2/recipe/build_prompts.py CORPUS MODEL.gguf requests.jsonl

Three kinds. Tasks are made of the sets of CORPUS (see the README beside this file): passages to sum up, to correct or
to ask about, headings to write about, instructions, sums. Questions are the model's own: it is given the beginning of a
conversation and says what a user would say there, as Magpie does (arXiv 2406.08464). Translations go back and forth:
what the model makes of an English sentence is what it shall put into English. None needs an answer: `mirrorsd train
text` lets the target write that.
"""

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.training.models.whole_model import load_whole
from mirrorsd.training.run.device import narrowed, to_device, use_device
from mirrorsd.training.text.self_prompts import chat_prompt, load_tokenizer
from mirrorsd.training.text.self_text import SelfTextConfig, generate_batch

SEED = 11
MARK = "@@"
"""Where a user's words begin in the chat template."""
BATCH = 128
LONGEST_QUESTION = 96
"""Tokens."""
PASSAGE = (300, 900)
"""Characters of a passage that a task is about."""
ANSWERED = 0.5
"""The temperature of answers to the model's own questions."""
STORY = (1200, 4800)
"""Characters of several passages, one behind the other, that a task is about."""
SUM_UP = (
    "Summarize the following passage.\n\n{}",
    "Summarize: {}",
    "{}\n\nWhat is the main idea of this text?",
    "Give me the key points of this text:\n\n{}",
    "Rewrite this text in simple words:\n\n{}",
)
ASK_ABOUT = (
    "Answer the question with the help of the text.\n\nText: {}\n\nQuestion: {}",
    "{}\n\nUsing the passage above: {}",
    "Context:\n{}\n\nQuestion: {}\nAnswer:",
)
CORRECT = (
    "Correct the grammar and spelling of this text:\n\n{}",
    "Proofread: {}",
    "Rewrite this text in a formal style.\n\n{}",
)
LANGUAGES = ("German", "French", "Spanish", "Italian")
WRITE_ABOUT = (
    "Explain {} to a beginner.",
    "Write a short essay about {}.",
    "What should I know about {}?",
    "Write a blog post about {}.",
    "Give me three facts about {}.",
    "Imagine you are a teacher. How would you introduce {} to your class?",
    "Write an email to a colleague about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a short story in which {} matters.",
    "Compare {} and {}.",
)
CODE = (
    "Write a Python function for {}.",
    "How does {} work? Show it in Python.",
    "Implement {} in Python and explain each step.",
)
COUNTS = {
    "instructions": 1100,
    "math": 1500,
    "summaries": 800,
    "stories": 800,
    "passages": 1000,
    "headings": 1500,
    "code": 300,
    "corrections": 400,
    "short questions": 2500,
}


def read(corpus: Path, name: str) -> list[dict[str, Any]]:
    """The records of a set; none of one that is missing."""
    packed, plain = corpus / f"{name}.jsonl.xz", corpus / f"{name}.jsonl"
    if not packed.is_file() and not plain.is_file():
        return []
    whole = lzma.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
    return [json.loads(line) for line in whole.splitlines()]


def passages(text: str) -> Iterator[str]:
    """Paragraphs of a fitting length."""
    for paragraph in text.split("\n\n"):
        if PASSAGE[0] <= len(paragraph) <= PASSAGE[1]:
            yield paragraph.strip()


def stories(text: str) -> Iterator[str]:
    """Neighbouring paragraphs, as many as fit."""
    whole = ""
    for paragraph in text.split("\n\n"):
        longer = f"{whole}\n\n{paragraph.strip()}".strip()
        if len(longer) <= STORY[1]:
            whole = longer
            continue
        if len(whole) >= STORY[0]:
            yield whole
        whole = ""


def headings(text: str) -> Iterator[str]:
    """What a textbook's parts are about."""
    for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        if 2 <= len(found.split()) <= 6 and not re.search(r"\d|Objectives|Summary|Review|Key |Chapter|Exercise", found):
            yield found.strip()


def tasks(corpus: Path, rng: random.Random) -> Iterator[str]:
    """Requests about what the sets hold, `COUNTS` of each kind."""
    books = read(corpus, "textbooks")
    found = sorted({paragraph for book in books for paragraph in passages(book["text"])})
    topics = sorted({topic for book in books for topic in headings(book["text"])})
    long = sorted({story for book in books for story in stories(book["text"])})
    tales = [record for record in read(corpus, "fairy_tale_qa") if len(record["context"]) <= STORY[1]]
    programs = sorted({Path(record["path"]).stem.replace("_", " ") for record in read(corpus, "python_code")})
    makers = {
        "instructions": [
            "\n\n".join(part for part in (record["instruction"], record["input"]) if part)
            for record in read(corpus, "instructions")
        ],
        "math": [record["question"] for record in read(corpus, "math")],
        "summaries": [rng.choice(SUM_UP).format(paragraph) for paragraph in found],
        "stories": [rng.choice(SUM_UP).format(story) for story in long],
        "passages": [rng.choice(ASK_ABOUT).format(record["context"], record["question"]) for record in tales],
        "headings": [rng.choice(WRITE_ABOUT).format(topic, rng.choice(topics)) for topic in topics],
        "code": [rng.choice(CODE).format(program) for program in programs],
        "corrections": [rng.choice(CORRECT).format(paragraph) for paragraph in found],
        "short questions": [record["question"].strip().capitalize() for record in read(corpus, "short_qa")],
    }
    for name, made in makers.items():
        yield from rng.sample(made, min(COUNTS[name], len(made)))


class Asked:
    """The model, asked many things at once."""

    def __init__(self, model: Path) -> None:
        use_device("auto")
        checkpoint = open_checkpoint(model, "target")
        self._tokenizer, self._ends = load_tokenizer(checkpoint.folder), checkpoint.eos_ids
        self._target = to_device(load_whole(checkpoint.path))

    def questions(self, count: int, temperature: float = 1.0) -> Iterator[str]:
        """What the model would be asked, by itself."""
        marked = self._tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        opening = list(self._tokenizer(marked[: marked.index(MARK)])["input_ids"])
        yield from (text for text in self._said([opening] * count, temperature) if text)

    def answers(self, questions: list[str], longest: int) -> Iterator[str]:
        """Each question with what the model answers, up to `longest` tokens, in its chat template."""
        prompts = [chat_prompt(self._tokenizer, [{"role": "user", "content": question}]) for question in questions]
        for text in self._texts(prompts, ANSWERED, longest):
            yield self._tokenizer.decode(text)

    def translations(self, sentences: list[str], rng: random.Random) -> Iterator[str]:
        """English sentences to translate, and what became of them, to translate back."""
        languages = [rng.choice(LANGUAGES) for _ in sentences]
        there = [f"Translate English to {name}: {text}" for name, text in zip(languages, sentences, strict=True)]
        prompts = [chat_prompt(self._tokenizer, [{"role": "user", "content": request}]) for request in there]
        for request, name, said in zip(there, languages, self._said(prompts, 0.8), strict=True):
            yield request
            if said:
                yield f"Translate {name} to English: {said}"

    def _said(self, prompts: list[list[int]], temperature: float) -> Iterator[str]:
        """What the model says after each; nothing where it comes to no end."""
        for prompt, text in zip(prompts, self._texts(prompts, temperature, LONGEST_QUESTION), strict=True):
            is_whole = text[-1] in self._ends
            yield self._tokenizer.decode(text[len(prompt) : -1]).strip() if is_whole else ""

    def _texts(self, prompts: list[list[int]], temperature: float, longest: int) -> Iterator[list[int]]:
        """Prompts with up to `longest` tokens behind each."""
        with narrowed(self._target.parameters()):
            for start in range(0, len(prompts), BATCH):
                some = prompts[start : start + BATCH]
                config = SelfTextConfig(ends=self._ends, max_new_tokens=longest, seed=SEED + start)
                yield from generate_batch(self._target, some, torch.full((len(some),), temperature), config)


def sentences(corpus: Path, count: int, rng: random.Random) -> list[str]:
    """Sentences of the textbooks."""
    texts = (record["text"] for record in read(corpus, "textbooks"))
    found = sorted({part.strip() for text in texts for part in re.findall(r"[A-Z][^.!?\n#|*]{30,160}[.!?]", text)})
    return rng.sample(found, min(count, len(found)))


def main() -> None:
    """Write tasks, own questions and translations in random order, each once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="the folder of sets")
    parser.add_argument("model", type=Path, help="the target: a .gguf file or a folder of transformers")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--questions", type=int, default=4000, help="how many questions the model thinks of")
    parser.add_argument("--translations", type=int, default=600, help="how many sentences go back and forth")
    given = parser.parse_args()
    rng, model = random.Random(SEED), Asked(given.model)
    translated = model.translations(sentences(given.corpus, given.translations, rng), rng)
    requests = sorted({*tasks(given.corpus, rng), *model.questions(given.questions), *translated} - {""})
    rng.shuffle(requests)
    with given.out.open("w", encoding="utf-8") as stream:
        for request in requests:
            stream.write(json.dumps({"messages": [{"role": "user", "content": request}]}, ensure_ascii=False) + "\n")
    print(f"{len(requests)} requests in {given.out}")


if __name__ == "__main__":
    main()
