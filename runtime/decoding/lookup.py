"""Windows that need no draft: how the text went on the last time that it stood as it does now.

Loops, names, quotations of the prompt: where the text agrees with an earlier part of itself, that part's continuation
is a guess that costs no drafting (prompt lookup decoding, A. Saxena, 2023). How good it is depends on how long the two
agree, and is learned (`policy/windows`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.decoding.step import Acceptance, Found, InFlight, ReadPrompt
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.policy.windows import MOST_COMPARED, RepeatChances

_LONGEST = 31
"""Most tokens of a window that costs no drafting: with the head's, what `tune` measures passes of."""
_LONGEST_END = 4
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
        end = tuple(text[-_LONGEST_END:].tolist())
        return next((place for first in range(len(end)) if (place := self._places.get(end[first:])) is not None), None)

    def _read(self, text: NDArray[np.int64]) -> None:
        """Note what every token of the text but the first came after."""
        first = max(self._num_read - _LONGEST_END, 0)
        tokens = text[first:].tolist()
        for place in range(max(self._num_read, 1), len(text)):
            stop = place - first
            for start in range(max(stop - _LONGEST_END, 0), stop):
                self._places[tuple(tokens[start:stop])] = place
        self._num_read = len(text)


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
        while length < min(place, MOST_COMPARED) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return Repeat(place, length)


class FreeRows:
    """Plain decoding: no window, but what fits into the rows that the target computes anyway (`row_group`)."""

    name = "plain"

    def __init__(self, request: Request, row_group: int = 1) -> None:
        self._request, self._row_group = request, row_group
        self._lookup = TextLookup()

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """See `WindowSource.start`."""
        read_prompt()
        return self.guess()

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """What free rows hold."""
        return Found(self.guess())

    def guess(self) -> NDArray[np.int64]:
        """How the text went on before, as far as rows are free."""
        count = min(self._row_group - 1, self._request.window_limit())
        return self._lookup.guess(self._request.known_text, count) if count > 0 else NO_TOKENS

    def observe(self, step: StepRecord) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        """Nothing is ever left running."""


class Repeats:
    """What the text has said before, where that is worth more than a window of the draft."""

    def __init__(self, request: Request) -> None:
        self._request = request
        windows = request.windows
        self._text = RepeatedText(windows.repeat_chances, request.num_known) if windows is not None else None

    def offer(self, least: float) -> NDArray[np.int64] | None:
        """What followed the last time, if that is worth more than `least` tokens."""
        request, windows = self._request, self._request.windows
        if self._text is None or windows is None:
            return None
        self._text.follow(request.known_text)
        limit = request.window_limit(None if request.speculation.pad_rows_to else _LONGEST)
        count = windows.cut_repeat(self._text.reach(limit), least)
        return self._text.window(request.known_text, count) if count else None


class LookupSource:
    """Takes every window from the text itself, and drafts none: what fits into free rows, and more where it pays.

    Where nobody knows what rows cost, windows are as long as they may be.
    """

    name = "lookup"

    def __init__(self, request: Request, row_group: int) -> None:
        self._request = request
        most = row_group if request.windows is not None else 1 + request.gamma
        self._repeats, self._free_rows = Repeats(request), FreeRows(request, most)

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """See `WindowSource.start`."""
        read_prompt()
        return self._window()

    def begin(self, inflight: InFlight) -> None:
        """Nothing works beside the target."""

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """How the text went on the last time."""
        window = self._window()
        return Found(window, "text") if len(window) else Found()

    def _window(self) -> NDArray[np.int64]:
        repeat = self._repeats.offer(0.0)
        return self._free_rows.guess() if repeat is None else repeat

    def observe(self, step: StepRecord) -> None:
        """What the text's speed makes of a row."""
        if self._request.windows is not None:
            self._request.windows.observe(step.num_window, step.num_accepted, step.own_seconds)

    def close(self) -> None:
        """Nothing is ever left running."""
