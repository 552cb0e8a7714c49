"""When a text is over: end-of-sequence ids, stop strings, the token limit."""

from typing import NamedTuple

from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.text.incremental_decoder import IncrementalDecoder


class Piece(NamedTuple):
    """Text that may be shown now; `stop_reason` is set with the last one: see `GenerationResult`."""

    text: str
    stop_reason: str | None


class StopWatch:
    """Follows the produced tokens of one request, holds back text that may turn out to be a stop string."""

    def __init__(self, config: GenerationConfig, eos_ids: tuple[int, ...], decoder: IncrementalDecoder) -> None:
        self._eos_ids = frozenset() if config.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(config.stop_token_ids)
        self._stop_strings = config.stop_strings
        self._decoder = decoder
        self._held = ""

    def push(self, token: int) -> Piece:
        """Take the next token and say what may be shown and whether the text is over."""
        if token in self._eos_ids:
            return self.finish("eos")
        self._held += self._decoder.push(token)
        cut = self._first_stop_string()
        if cut is not None:
            return self._end(self._held[:cut], "stop_string")
        if token in self._stop_ids:
            return self.finish("stop_token")
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Piece(shown, None)

    def finish(self, reason: str) -> Piece:
        """All text still held back; `stop_string` comes before `reason` where the decoder held one back."""
        self._held += self._decoder.finish()
        cut = self._first_stop_string()
        return self._end(self._held, reason) if cut is None else self._end(self._held[:cut], "stop_string")

    def _end(self, shown: str, reason: str) -> Piece:
        self._held = ""
        return Piece(shown, reason)

    def _first_stop_string(self) -> int | None:
        places = [self._held.find(stop) for stop in self._stop_strings]
        return min((place for place in places if place >= 0), default=None)

    def _possible_start(self) -> int:
        """Length of the longest tail that begins a stop string.

        With stop string `"END"` and held text `"... E"` one character waits.
        """
        longest = 0
        for stop in self._stop_strings:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
