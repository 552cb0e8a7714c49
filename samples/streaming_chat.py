"""A conversation on the terminal: text appears as it is verified; steps that took drafted tokens are underlined.

python samples/streaming_chat.py storyteller.mirror
"""

import sys

from mirrorsd import MirrorPipeline

UNDERLINE, RESET = "\033[4m", "\033[0m"


def mark(text: str, is_drafted: bool) -> str:
    """Underline the text of a step that accepted drafted tokens."""
    return f"{UNDERLINE}{text}{RESET}" if is_drafted and text else text


with MirrorPipeline.load(sys.argv[1]) as pipe:
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = input("\n> ")
        except EOFError:
            break
        messages.append({"role": "user", "content": question})
        for chunk in pipe.stream(messages=messages, max_new_tokens=200):
            print(mark(chunk.text, any(token.source == "window" for token in chunk.tokens)), end="", flush=True)
            if chunk.result is not None:
                messages.append({"role": "assistant", "content": chunk.result.text})
        print()
