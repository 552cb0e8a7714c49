"""Prompts for a pair that writes code: write a function, edit one, chat. In Spec-Bench's form, three categories.

    python bench/claims/peers/pair_prompts.py code.jsonl.xz spec_bench.jsonl prompts.jsonl --count 20
    mirrorsd compare pair.mirror --prompts prompts.jsonl --greedy --by-category --methods plain,serial,lookup,auto

The first file has a Python module per line (`text`), the second Spec-Bench's questions. Functions and questions are
drawn by `--seed`, so that another seed gives prompts that nobody has seen.
"""

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FUNCTION = re.compile(r"(?m)^def (\w{6,})\([^)]*\)[^:]*:\n(?:    .*\n|\n)+")
_LEAST, _MOST = 250, 700
"""Characters of a function that is edited."""
_CHATS = ("writing", "roleplay", "reasoning", "stem", "humanities", "qa", "math")
_LONGEST_CHAT = 1200
_EDITS = (
    "Rename the function `{name}` to `{name}_v2`, keep everything else as it is, and show the whole code:",
    "Add type hints to every argument of this function and show the whole code:",
)


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, count = random.Random(options.seed), options.count
    found = list(functions(options.code))
    rng.shuffle(found)
    chats = [row["turns"][0] for row in lines(options.questions) if row["category"] in _CHATS]
    chats = [chat for chat in chats if len(chat) < _LONGEST_CHAT]
    rng.shuffle(chats)
    written = [("write", f"Write a Python function `{name}` with a docstring and type hints.") for name, _ in found]
    edited = [
        ("edit", f"{_EDITS[number % 2].format(name=name)}\n\n```python\n{code}\n```")
        for number, (name, code) in enumerate(found[count : 2 * count])
    ]
    prompts = [*written[:count], *edited, *(("chat", chat) for chat in chats[:count])]
    with options.output.open("w", encoding="utf-8") as stream:
        for number, (category, prompt) in enumerate(prompts):
            stream.write(json.dumps({"question_id": number, "category": category, "turns": [prompt]}) + "\n")


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Names and sources of the first function of fitting size in each module."""
    for row in lines(path):
        found = _FUNCTION.search(row["text"])
        if found is not None and _LEAST < len(found[0]) < _MOST:
            yield found[1], found[0].rstrip()


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, packed by xz or not."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


if __name__ == "__main__":
    main()
