"""Conversations that a chat model has with itself: the text that `mirrorsd export --calibration` rounds weights by.

    python samples/smollm2/recipe/build_calibration.py MODEL.gguf calibration.txt

The model says what a user would ask (as `build_prompts.py` has it) and answers. Rounding wants the inputs that products
will be given, and in a chat those are of such text.
"""

import argparse
from pathlib import Path

from build_prompts import Asked

QUESTIONS = 72
ASKED = 0.8
"""The temperature of questions."""
LONGEST_ANSWER = 192
"""Tokens."""


def main() -> None:
    """Write the conversations, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the target: a .gguf file or a folder of transformers")
    parser.add_argument("out", type=Path, help="the text file to write")
    given = parser.parse_args()
    model = Asked(given.model)
    questions = sorted({*model.questions(QUESTIONS, ASKED)})
    given.out.write_text("\n".join(model.answers(questions, LONGEST_ANSWER)) + "\n", encoding="utf-8")
    print(f"{len(questions)} conversations in {given.out}")


if __name__ == "__main__":
    main()
