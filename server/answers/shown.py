"""Which tokens a text's characters came from: text may be held back, or dropped at a stop, and its tokens with it."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mirrorsd.runtime import GeneratedToken
from mirrorsd.server.bundles.loaded import LoadedBundle


class Placed(NamedTuple):
    """A token and where its text begins, in characters of the answer."""

    token: GeneratedToken
    offset: int


class ShownTokens:
    """Follows one answer: tokens come when they are decided, and count when some of their text has been shown.

    Args:
        bundle: whose tokenizer makes text of them.
        prompt: ids before them.
        skip_special_tokens: as the answer was asked for.
    """

    def __init__(self, bundle: LoadedBundle, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._decoder = bundle.tokenizer.decoder(prompt, skip_special_tokens=skip_special_tokens)
        self._waiting: deque[Placed] = deque()
        self._pieces: deque[tuple[str, str]] = deque()
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
            piece = self._decoder.push(token.id)
            self._decoded += len(piece)
            if piece:
                self._pieces.append((piece, token.source))
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
            piece, source = self._pieces.popleft()
            if len(piece) > len(text):
                self._pieces.appendleft((piece[len(text) :], source))
                piece = piece[: len(text)]
            found.append((text[: len(piece)], source))
            text, self._last_source = text[len(piece) :], source
        if text:
            found.append((text, self._last_source))
        return found
