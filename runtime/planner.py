"""What the draft prepares for: turns an exit's guesses into roots."""

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.choosing import TokenChooser
from mirrorsd.runtime.generation_config import SpeculationConfig
from mirrorsd.runtime.roots import Proxies, Root, global_roots, per_row_roots
from mirrorsd.runtime.target_session import ExitGuesses

_FIRST_RATE = 0.6
_MEMORY = 0.95


class RootPlanner:
    """Chooses roots for one request; learns the running acceptance rate (share of tried window tokens accepted)."""

    def __init__(self, speculation: SpeculationConfig, chooser: TokenChooser) -> None:
        self._speculation = speculation
        self._chooser = chooser
        self.acceptance_rate = _FIRST_RATE

    def plan(self, head: int, window: NDArray[np.int64], guesses: ExitGuesses) -> list[Root]:
        """Roots for a window after the head token at position `head`, likeliest first.

        The exit's candidates compete with the noise that the target will use at the same positions.
        """
        num_rows = len(window) + 1
        positions = head + 1 + np.arange(num_rows)
        ids, logprobs = guesses.ids[:num_rows], guesses.logprobs[:num_rows]
        proxies = Proxies(ids, self._chooser.rank(ids, logprobs, positions))
        if self._speculation.allocation == "per_row":
            return per_row_roots(window, proxies, self._speculation.kappa)
        return global_roots(window, proxies, self._speculation.roots, self.acceptance_rate)

    def observe(self, num_window: int, num_accepted: int) -> None:
        """Learn from a verified window: accepted tokens were right, the next one (if any) was wrong."""
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_window):
            self.acceptance_rate = _MEMORY * self.acceptance_rate + (1 - _MEMORY) * is_right
