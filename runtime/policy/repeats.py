"""Texts that repeat themselves: how the text went on the last time, and how likely it goes on like that again.

Loops, names, quotations of the prompt: where the text agrees with an earlier part of itself, that part's continuation
is a guess that needs no draft (prompt lookup decoding, A. Saxena, 2023). How good it is depends on how long the two
agree, and is learned. Does not own whether such a guess is worth more than a drafted window (`window_length`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.policy.times import Ratio

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


_LENGTHS = (1, 2, 3, 4, 6, 9, 14)
"""Longest agreement of each class but the last."""
_FIRST = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
_SUREST = 0.99
_MOST_COMPARED = _LENGTHS[-1] + 1


class RepeatChances:
    """How often the next token is the one that followed before, by how many tokens before it agree."""

    def __init__(self) -> None:
        self._shares = [Ratio(first) for first in _FIRST]

    def observe(self, length: int, *, is_right: bool) -> None:
        """Learn from one token."""
        self._share(length).observe(float(is_right), 1.0)

    def reach(self, length: int, count: int) -> list[float]:
        """Chance of each of the next `count` tokens to be right, and all before it."""
        found, so_far = [], 1.0
        for more in range(count):
            so_far *= min(self._share(length + more).value, _SUREST)
            found.append(so_far)
        return found

    def _share(self, length: int) -> Ratio:
        return self._shares[next((i for i, longest in enumerate(_LENGTHS) if length <= longest), len(_LENGTHS))]


class Repeat(NamedTuple):
    """The text's end agrees with an earlier part of it."""

    place: int
    """Where the token stands that followed there."""
    length: int
    """How many tokens agree."""


class RepeatedText:
    """Follows one text that only grows, and the part of it that it repeats."""

    def __init__(self, chances: RepeatChances, num_prompt: int) -> None:
        """Learn `chances` from what comes after the prompt."""
        self._chances = chances
        self._lookup = TextLookup()
        self._num_read = num_prompt
        self._repeat: Repeat | None = None

    def follow(self, text: NDArray[np.int64]) -> None:
        """Read the text's new tokens."""
        repeat = self._repeat or self._find(text[: self._num_read])
        for position in range(self._num_read, len(text)):
            is_right = repeat is not None and bool(text[repeat.place] == text[position])
            if repeat is not None:
                self._chances.observe(repeat.length, is_right=is_right)
            if repeat is not None and is_right:
                repeat = Repeat(repeat.place + 1, repeat.length + 1)
            else:
                repeat = self._find(text[: position + 1])
        self._repeat, self._num_read = repeat, len(text)

    def reach(self, count: int) -> Sequence[float]:
        """Chance of each of the next `count` tokens, and all before it, to be as they were; empty without a repeat."""
        return self._chances.reach(self._repeat.length, count) if self._repeat is not None else []

    def window(self, text: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """The next `count` tokens, as they were: a text that repeats its last three goes round and round."""
        assert self._repeat is not None
        return np.resize(text[self._repeat.place :], count)

    def _find(self, text: NDArray[np.int64]) -> Repeat | None:
        place = self._lookup.find(text)
        if place is None:
            return None
        length = 0
        while length < min(place, _MOST_COMPARED) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return Repeat(place, length)
