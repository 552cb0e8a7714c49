"""Which tokens a text's characters came from: text may be held back, or dropped at a stop, and its tokens with it."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mirrorsd.runtime import GeneratedToken


class Placed(NamedTuple):
    """A token and where its text begins, in characters of the answer."""

    token: GeneratedToken
    offset: int


class ShownTokens:
    """Follows one answer: tokens come when they are decided, and count when some of their text has been shown."""

    def __init__(self) -> None:
        self._waiting: deque[Placed] = deque()
        self._pieces: deque[tuple[int, str]] = deque()
        self._decoded = self._shown = 0
        self._last_source = "plain"

    def take(
        self, tokens: Sequence[GeneratedToken], text: str, *, is_last: bool = False
    ) -> tuple[list[Placed], list[tuple[str, str]]]:
        """Tokens that count from now on, and the text that is shown now as `(text, source)` pieces.

        Args:
            tokens: what the step decided.
            text: what is shown of all so far.
            is_last: no more text comes: tokens whose text is not shown were dropped.
        """
        for token in tokens:
            self._waiting.append(Placed(token, self._decoded))
            self._decoded += token.num_decoded
            if token.num_decoded:
                self._pieces.append((token.num_decoded, token.source))
        self._shown += len(text)
        counted = []
        while self._waiting and self._waiting[0].offset < self._shown:
            counted.append(self._waiting.popleft())
        if is_last:
            self._waiting.clear()
        return counted, self._split(text)

    def _split(self, text: str) -> list[tuple[str, str]]:
        """Share a text out among the sources of its tokens; what no token's text accounts for goes to the last one."""
        found: list[tuple[str, str]] = []
        while text and self._pieces:
            length, source = self._pieces.popleft()
            if length > len(text):
                self._pieces.appendleft((length - len(text), source))
            found.append((text[:length], source))
            text, self._last_source = text[length:], source
        if text:
            found.append((text, self._last_source))
        return found
