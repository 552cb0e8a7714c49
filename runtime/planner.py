"""What the draft prepares for: scores (row, next token) guesses from the draft's own candidates and the exit's.

The one place that decides. `root_source` switches what it knows: `proxy` waits for the exit (the paper), `early` uses
the draft's own runners-up from the start, `progressive` starts like `early` and is corrected by each exit's message.
"""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.choosing import TokenChooser
from mirrorsd.runtime.generation_config import SpeculationConfig
from mirrorsd.runtime.roots import Proxies, Root, combine_proxies, global_roots, per_row_roots

_FIRST_RATE = 0.6
_MEMORY = 0.95
Candidates = tuple[NDArray[np.int64], NDArray[np.floating]]


class RootPlanner:
    """Chooses roots for one request; learns the running acceptance rate (share of tried window tokens accepted)."""

    def __init__(self, speculation: SpeculationConfig, chooser: TokenChooser) -> None:
        self._speculation = speculation
        self._chooser = chooser
        self.acceptance_rate = _FIRST_RATE

    @property
    def is_early(self) -> bool:
        """Whether roots may come from the draft's own candidates."""
        return self._speculation.root_source != "proxy"

    @property
    def is_listening(self) -> bool:
        """Whether the exits' messages are used."""
        return self._speculation.root_source != "early"

    def plan(
        self, head: int, window: NDArray[np.int64], by_draft: Candidates | None, by_exit: Candidates | None
    ) -> list[Root]:
        """Roots for a window after the head token at position `head`, likeliest first.

        Candidates (`ids [g+1, m]`, `logprobs [g+1, m]`) compete with the noise that the target will use at the same
        positions. Where draft and exit both spoke, the mean of their log-probabilities decides.
        """
        draft = self._compete(head, window, by_draft)
        proxies = self._compete(head, window, by_exit)
        source = "exit"
        if proxies is None:
            assert draft is not None
            proxies, source = draft, "early"
        elif draft is not None:
            proxies = combine_proxies(draft, proxies)
        if self._speculation.allocation == "per_row":
            return per_row_roots(window, proxies, self._speculation.kappa, source)
        return global_roots(window, proxies, self._speculation.roots, self.acceptance_rate, source)

    def observe(self, num_window: int, num_accepted: int) -> None:
        """Learn from a verified window: accepted tokens were right, the next one (if any) was wrong."""
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_window):
            self.acceptance_rate = _MEMORY * self.acceptance_rate + (1 - _MEMORY) * is_right

    def _compete(self, head: int, window: NDArray[np.int64], candidates: Candidates | None) -> Proxies | None:
        if candidates is None:
            return None
        num_rows = len(window) + 1
        ids, logprobs = candidates[0][:num_rows], candidates[1][:num_rows]
        return Proxies(ids, self._chooser.rank(ids, logprobs, head + 1 + np.arange(num_rows)))
