"""A request's filters: how many candidates top-k, top-p and min-p leave of a shortlist.

Owns: what becomes of candidates with log-probabilities. Does not own: which tokens of a whole row are kept
(`likely_tokens`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST, _NOTHING = -60.0, 1e-12
"""The least log-share and mass that are told from none."""
_MOST = 700.0
"""In logs: about the largest number there is."""


class ShortlistFilter(NamedTuple):
    """A request's filters; `top_k = 0`, `top_p = 1` and `min_p = 0` keep everything."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def keeps_all(self) -> bool:
        """Whether no token is ever dropped."""
        return self.top_k <= 0 and self.top_p >= 1 and self.min_p <= 0

    @property
    def is_by_rank_alone(self) -> bool:
        """Whether tokens fall by their rank only: the likeliest decide it, not those that noise has brought up."""
        return self.top_k > 0 and self.top_p >= 1 and self.min_p <= 0

    def dropped(self, logprobs: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Say which candidates `[..., m]` fall: log-probabilities before the temperature, in any order.

        Rows of which nothing is known (`-inf`) keep what they have.

        >>> by_mass = ShortlistFilter(temperature=1.0, top_k=0, top_p=0.8, min_p=0.0)
        >>> by_mass.dropped(np.log(np.array([0.1, 0.6, 0.3]))).tolist()
        [True, False, False]
        >>> ShortlistFilter(0.5, top_k=0, top_p=1.0, min_p=0.1).dropped(np.log(np.array([0.6, 0.3, 0.1]))).tolist()
        [False, False, True]
        """
        best = logprobs.max(axis=-1, keepdims=True)
        is_known = np.isfinite(best)
        behind = np.where(is_known, np.subtract(logprobs, np.where(is_known, best, 0.0), dtype=np.float64), 0.0)
        floor = np.full(best.shape, -np.inf)
        if self.min_p > 0:
            floor[:] = self.temperature * np.log(self.min_p)
        if self.top_k > 0 or self.top_p < 1:
            np.maximum(floor, self._least_kept(behind, best), out=floor)
        fallen: NDArray[np.bool_] = behind < floor
        return fallen

    def _least_kept(self, behind: NDArray[np.float64], best: NDArray[np.floating]) -> NDArray[np.float64]:
        """The last candidate `[..., 1]` that top-k, then top-p keep."""
        ordered = -np.sort(-behind, axis=-1)
        kept = ordered.shape[-1]
        mass = np.exp(ordered / self.temperature)
        if 0 < self.top_k <= kept:
            kept = self.top_k
            total = mass[..., :kept].sum(axis=-1, keepdims=True)
        else:
            total = mass.sum(axis=-1, keepdims=True) + self._unseen(ordered, best)
        if self.top_p >= 1:
            return ordered[..., kept - 1 : kept]
        before = np.cumsum(mass[..., :kept], axis=-1) - mass[..., :kept]
        num_kept = (before < self.top_p * total).sum(axis=-1, keepdims=True)
        return np.take_along_axis(ordered, np.maximum(num_kept, 1) - 1, axis=-1)

    def _unseen(self, ordered: NDArray[np.float64], best: NDArray[np.floating]) -> NDArray[np.float64]:
        """Mass of the tokens outside the list, relative to the best, at the temperature; at most what top-k leaves.

        Before the temperature it is what the list lacks. It is shared out as a geometric sequence that goes on from
        the list's last candidate, of which every member then takes the temperature's power.
        """
        last = np.exp(np.maximum(ordered[..., -1:], _LEAST))
        lacking = np.exp(-best.astype(np.float64)) - np.exp(ordered).sum(axis=-1, keepdims=True)
        lacking = np.where(np.isfinite(lacking), np.maximum(lacking, _NOTHING), _NOTHING)
        power = 1 / self.temperature
        growth = np.expm1(np.minimum(power * np.log1p(last / lacking), _MOST))
        unseen: NDArray[np.float64] = last**power / growth
        if self.top_k > 0:
            np.minimum(unseen, (self.top_k - ordered.shape[-1]) * last**power, out=unseen)
        return unseen
