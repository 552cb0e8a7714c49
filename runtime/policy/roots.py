"""What the draft prepares for: the likeliest (row, next token) roots, from the draft's own candidates and the exit's.

The one place that decides. `root_source` switches what it knows: `proxy` waits for the exit (the paper), `early` uses
the draft's own runners-up from the start, `progressive` starts like `early` and is corrected by each exit's message.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import ExitGuesses
from mirrorsd.runtime.config import SpeculationConfig
from mirrorsd.runtime.policy.root_scores import RootChances, RootScores, ScoredCandidates, join, root_chances
from mirrorsd.runtime.sampling.chooser import TokenChooser


class Root(NamedTuple):
    """The guess "exactly `row` window tokens are accepted and the next target token is `token`"."""

    row: int
    token: int
    score: float
    source: str


def per_row_roots(found: RootChances, kappa: int, source: str = "exit") -> list[Root]:
    """The best `kappa` candidates of every row, likeliest first (Mirror-SD, section 3).

    >>> found = RootChances(np.array([[6, 7], [9, 3]]), np.array([[0.2, 0.1], [0.6, 0.1]]))
    >>> [(root.row, root.token) for root in per_row_roots(found, 1)]
    [(1, 9), (0, 6)]
    """
    order = np.argsort(-found.chances, axis=1, kind="stable")[:, :kappa]
    kept = np.zeros_like(found.chances)
    np.put_along_axis(kept, order, np.take_along_axis(found.chances, order, axis=1), axis=1)
    return global_roots(RootChances(found.ids, kept), kept.size, source)


def global_roots(found: RootChances, budget: int, source: str = "exit") -> list[Root]:
    """The best `budget` roots over all rows, likeliest first.

    >>> found = RootChances(np.array([[6, 7], [9, 3]]), np.array([[0.2, 0.1], [0.6, 0.0]]))
    >>> [(root.row, root.token) for root in global_roots(found, 8)]
    [(1, 9), (0, 6), (0, 7)]
    """
    best = np.argsort(-found.chances, axis=None, kind="stable")[:budget]
    rows = best // found.chances.shape[1]
    chances, ids = found.chances.ravel()[best], found.ids.ravel()[best]
    return [
        Root(row, token, chance, source)
        for row, token, chance in zip(rows.tolist(), ids.tolist(), chances.tolist(), strict=True)
        if chance > 0
    ]


FIRST_RATE, RATE_MEMORY = 0.6, 0.95
DraftCandidates = tuple[NDArray[np.int64], NDArray[np.floating]]
"""Ids and log-probabilities `[g+1, m]` after the head token and after every window token."""


class RootPlanner:
    """Chooses roots for one request; learns the running acceptance rate (share of tried window tokens accepted)."""

    def __init__(self, speculation: SpeculationConfig, chooser: TokenChooser, scores: RootScores) -> None:
        self._speculation, self._chooser, self._scores = speculation, chooser, scores
        self.acceptance_rate = FIRST_RATE

    @property
    def is_early(self) -> bool:
        """Whether roots may come from the draft's own candidates."""
        return self._speculation.root_source != "proxy"

    @property
    def is_listening(self) -> bool:
        """Whether the exits' messages are used."""
        return self._speculation.root_source != "early"

    def plan(
        self, head: int, window: NDArray[np.int64], by_draft: DraftCandidates | None, by_exit: ExitGuesses | None
    ) -> list[Root]:
        """Roots for a window after the head token at position `head`, likeliest first.

        Candidates compete with the noise that the target will use at the same positions. At least one of draft and exit
        must have spoken.
        """
        draft = self._compete(head, window, *by_draft) if by_draft else None
        exit_ = self._compete(head, window, by_exit.ids, by_exit.logprobs) if by_exit else None
        known = "both" if draft and exit_ else "draft" if draft else "exit"
        layer = by_exit.layer if by_exit else 0
        weights = self._scores.weights(known, layer, is_sampling=self._chooser.is_sampling)
        found = root_chances(window, join(draft, exit_), weights, self.acceptance_rate)
        source = "exit" if by_exit else "early"
        if self._speculation.allocation == "per_row":
            return per_row_roots(found, self._speculation.kappa, source)
        return global_roots(found, self._speculation.roots, source)

    def observe(self, num_window: int, num_accepted: int) -> None:
        """Learn from a verified window: accepted tokens were right, the next one (if any) was wrong."""
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_window):
            self.acceptance_rate = RATE_MEMORY * self.acceptance_rate + (1 - RATE_MEMORY) * is_right

    def _compete(
        self, head: int, window: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.floating]
    ) -> ScoredCandidates:
        num_rows = len(window) + 1
        positions = head + 1 + np.arange(num_rows)
        return compete(self._chooser, ids[:num_rows], logprobs[:num_rows], positions)


def compete(
    chooser: TokenChooser, ids: NDArray[np.int64], logprobs: NDArray[np.floating], positions: NDArray[np.int64]
) -> ScoredCandidates:
    """Candidates `[n, K]` with the noise that the target will use at `positions [n]`."""
    noise = chooser.noise(ids, positions)
    return ScoredCandidates(ids, chooser.scores(logprobs, noise), noise)
