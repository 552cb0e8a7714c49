"""What followed the last time: guesses from the text itself, for rows that cost nothing.

The idea is prompt lookup decoding's (A. Saxena, 2023): texts repeat names, phrases and whole lines, their own and the
prompt's. Does not own when such a guess is verified (`free_rows`).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["TextLookup"]

_LONGEST = 4
"""Tokens of context that are looked for first; then fewer, down to one."""


class TextLookup:
    """Where every run of up to four tokens stood last, in one text that only grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def guess(self, text: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Up to `count` tokens that followed where the text's end stood before, the longest end that did; or none.

        >>> TextLookup().guess(np.array([5, 1, 2, 8, 6, 1, 2]), 2).tolist()
        [8, 6]
        >>> TextLookup().guess(np.array([5, 1, 2]), 2).tolist()
        []
        """
        place = self.find(text)
        return text[:0] if place is None else text[place : place + count].copy()

    def find(self, text: NDArray[np.int64]) -> int | None:
        """Where the token stands that followed the longest end of the text that stood there before; None without.

        >>> TextLookup().find(np.array([5, 1, 2, 8, 6, 1, 2]))
        3
        """
        self._read(text)
        end = tuple(text[-_LONGEST:].tolist())
        return next((place for first in range(len(end)) if (place := self._places.get(end[first:])) is not None), None)

    def _read(self, text: NDArray[np.int64]) -> None:
        """Note what every token of the text but the first came after."""
        first = max(self._num_read - _LONGEST, 0)
        tokens = text[first:].tolist()
        for place in range(max(self._num_read, 1), len(text)):
            stop = place - first
            for start in range(max(stop - _LONGEST, 0), stop):
                self._places[tuple(tokens[start:stop])] = place
        self._num_read = len(text)
