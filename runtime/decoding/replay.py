"""Windows that an earlier run of the text has left: what `GenerationConfig.continue_from` brings along.

They are verified like any other window, so that noise, penalties, the form of the text and log-probabilities follow
them by the same code, row by row. What the target would not have said itself is an error, and never text.
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.errors import ContinuationError
from mirrorsd.runtime.decoding.protocol import Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.request import REPLAY, Acceptance, Request
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.texts.config import LONGEST_WINDOW


class ReplaySource(WindowSource):
    """Gives the ids in their order. The last of each piece is no guess but the target's own token of that step.

    So a step never says more than there is: of five ids and windows of two, the first step has `[a, b]` for a window
    and must say `c` itself, the second has `[d]` and must say `e`.
    """

    name = REPLAY

    def __init__(self, request: Request) -> None:
        self._request = request
        self._most = None if request.speculation.pad_rows_to else LONGEST_WINDOW

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        read_prompt()
        return self._window()

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The next piece.

        Raises:
            ContinuationError: the target has said something else than the last one.
        """
        request = self._request
        first = request.num_new - acceptance.num_accepted - 1
        expected = request.config.continue_from[first + acceptance.num_accepted]
        if acceptance.num_accepted < len(inflight.window) or acceptance.next_token != expected:
            place = first + acceptance.num_accepted
            raise ContinuationError.of(place, f"{expected} was given, {acceptance.next_token} is chosen")
        return Found(self._window())

    def _window(self) -> NDArray[np.int64]:
        request = self._request
        count = min(request.window_limit(self._most), request.num_to_replay - 1)
        if count <= 0:
            return NO_TOKENS
        first = request.num_new
        return np.array(request.config.continue_from[first : first + count], dtype=np.int64)
