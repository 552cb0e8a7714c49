"""Plain decoding as `auto` runs it: rows that the target computes anyway hold a guess from the text.

A target whose rows come in pairs (`TargetSession.row_group`) takes as long for two rows as for one. The second one
is verified like any window's: it brings a token more or nothing, and never costs one. `method = "plain"` leaves it
empty: that is the reference.
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.draft_chain import NO_TOKENS
from mirrorsd.runtime.drivers import InFlight, Outcome, PlainDriver
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.target_link import TargetLink
from mirrorsd.runtime.text_lookup import TextLookup

__all__ = ["FreeRowDriver"]


class FreeRowDriver(PlainDriver):
    """One target pass a step, with nothing in flight but what fits into the rows of its last group."""

    def __init__(self, request: Request, target: TargetLink) -> None:
        super().__init__(request, target)
        self._lookup = TextLookup()

    def step(self, inflight: InFlight) -> Outcome:
        """As in plain decoding; a window that is in flight already is verified as it is."""
        return super().step(inflight if len(inflight.window) else inflight._replace(window=self._guess()))

    def _guess(self) -> NDArray[np.int64]:
        count = min(self.target.row_group - 1, self.request.window_limit())
        return self._lookup.guess(self.request.tokens, count) if count > 0 else NO_TOKENS
