"""How many of 40 chat answers loop: say a sentence three times or more, by the chat's defaults and greedily.

    python bench/claims/chat_loops.py smollm2.mirror --output chat_loops_smollm2.json

Answers are bounded by `--tokens` and end at the model's own end. Of the defaults each question has the seed of its
number, so that the same texts come again. Exit status 1 if more than `--most` answers loop by the defaults.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs

QUESTIONS = (
    "What do bees make?",
    "Why is the sky blue?",
    "What is the capital of France?",
    "How do I boil an egg?",
    "Tell me a joke.",
    "Who wrote Hamlet?",
    "What is a prime number?",
    "Give me three tips for sleeping better.",
    "Explain photosynthesis to a child.",
    "What is the difference between a frog and a toad?",
    "Write a short poem about rain.",
    "How does a bicycle stay upright?",
    "What should I pack for a week at the sea?",
    "Name five fruits that grow on trees.",
    "What is inflation?",
    "Write a polite message that cancels a meeting.",
    "How many days does a leap year have?",
    "What is the largest ocean?",
    "Explain recursion in a few sentences.",
    "Write a Python function that reverses a string.",
    "How do I learn to play the guitar?",
    "What are black holes?",
    "Suggest a name for a small bakery.",
    "Why do leaves change their colour in autumn?",
    "What is the water cycle?",
    "How can I save money on groceries?",
    "Tell me about the moon.",
    "What is the plot of Romeo and Juliet?",
    "How do vaccines work?",
    "Write two sentences about a lost dog.",
    "What does a chief executive do?",
    "How do I remove a coffee stain?",
    "What is machine learning?",
    "Plan a day in Rome.",
    "Who was Marie Curie?",
    "What is the best way to say sorry?",
    "Explain supply and demand.",
    "How far away is the sun?",
    "Describe a quiet morning in a village.",
    "What is a good breakfast?",
)
_END = re.compile(r"(?<=[.!?])\s+|\n+")
_MARK = re.compile(r"^[\W\d_]+")
_FEWEST_WORDS, _LOOP = 3, 3


def main() -> int:
    """Ask, count, print and write the report."""
    parser = runs.parser(__doc__, tokens=256)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="auto")
    parser.add_argument("--most", type=int, default=2, help="answers that may loop")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe, pipe.session() as session:
        chat = pipe.manifest.chat_defaults
        asked = GenerationConfig(max_new_tokens=options.tokens)
        ways = {
            "defaults": (asked, chat.generation),
            "greedy": (asked.with_overrides({"temperature": 0.0, "use_defaults": False}), {}),
        }
        for name, (config, defaults) in ways.items():
            results = [
                session.generate(
                    messages=[{"role": "user", "content": question}],
                    config=(config if name == "greedy" else config.with_overrides({"seed": number})).resolve(defaults),
                )
                for number, question in enumerate(QUESTIONS)
            ]
            said = [most_said(result.text) for result in results]
            loops = sum(count >= _LOOP for count in said)
            tokens = sum(result.num_tokens for result in results)
            rows.append({"way": name, "answers": len(said), "loops": loops, "most_said": max(said), "tokens": tokens})
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, tokens=options.tokens, chat=chat.generation, source=chat.source)
    runs.finish(report | {"ends": "honoured", "rows": rows}, options.output)
    return int(rows[0]["loops"] > options.most)


def most_said(text: str) -> int:
    """How often an answer says the sentence that it says most often; marks of lists and the case do not count.

    >>> most_said("Bees make honey. 1. Bees make honey! So it is.")
    2
    """
    sentences = (_MARK.sub("", sentence).rstrip(" .!?").casefold() for sentence in _END.split(text))
    found = Counter(sentence for sentence in sentences if len(sentence.split()) >= _FEWEST_WORDS)
    return max(found.values(), default=1)


if __name__ == "__main__":
    sys.exit(main())
