"""The best logits of rows that stay on a device, and whether they hold all that a request's filters keep.

Owns: that proof, and what is kept. Where it fails, the whole
row has to be read: a text never depends on which of the two it was.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.sampling.filters import kept_tokens, least_kept
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

_MASS_ERROR = 1e-4
"""Of a row's mass: single precision costs a thousandth of that in a sum, a GPU's exponentials a tenth."""


class ShortRow(NamedTuple):
    """The best of one row of logits.

    Attributes:
        ids: `[M]`.
        logits: `[M]`, the largest first.
        mass: sum over the whole row of `exp((logit - best) / temperature)`, as the device makes it.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.floating]
    mass: float

    def ordered(self) -> "ShortRow":
        """By logit, of equals the lowest id first: devices differ there."""
        order = np.lexsort((self.ids, -self.logits))
        return self._replace(ids=self.ids[order], logits=self.logits[order])

    def num_kept(self, filters: ShortlistFilter) -> int | None:
        """How many of an `ordered` row's candidates are kept (by top-k alone if there is one); None: some are not here.

        >>> row = ShortRow(np.array([7, 2, 9]), np.log([0.6, 0.3, 0.05]).astype(np.float32), 1 / 0.6)
        >>> [row.num_kept(ShortlistFilter(1.0, *chosen)) for chosen in ((2, 1, 0), (3, 1, 0), (0, 1, 0.4), (0, 0.8, 0))]
        [2, None, 2, 2]
        """
        count = filters.top_k or self._num_above_and_within(filters)
        # an equal of the last kept one that is not here might go first
        is_sure = count is not None and count < len(self.logits) and self.logits[-1] < self.logits[count - 1]
        return count if is_sure else None

    def _num_above_and_within(self, filters: ShortlistFilter) -> int | None:
        """Candidates that min-p keeps, before which less than `top_p` stands; None where the mass leaves a doubt."""
        floor = least_kept(float(self.logits[0]), filters, self.logits.dtype)
        count = int(np.count_nonzero(self.logits >= floor))
        if filters.top_p >= 1:
            return count
        behind = (self.logits[:count].astype(np.float64) - float(self.logits[0])) / filters.temperature
        masses = np.exp(behind)
        before, kept_mass = np.cumsum(masses) - masses, filters.top_p * self.mass
        if np.abs(before - kept_mass).min() < _MASS_ERROR * self.mass:
            return None
        return int(np.count_nonzero(before < kept_mass))

    def kept(self, filters: ShortlistFilter) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
        """Ids `[n]`, ascending, and logits of what `kept_tokens` keeps of the whole row: it has a `num_kept`."""
        count = self.num_kept(filters)
        assert count is not None
        places = np.argsort(self.ids[:count])
        ids, logits = self.ids[:count][places], self.logits[:count][places]
        left = filters if filters.top_k > 0 else filters._replace(top_p=1.0)
        kept = kept_tokens(logits, float(self.logits[0]), left._replace(top_k=0))
        return (ids, logits) if kept is None else (ids[kept], logits[kept])


Best = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]
"""Of rows: ids and logits `[R, M]`, and the masses `[R]`."""


def short_rows(best: Best | None, filters: ShortlistFilter) -> Sequence[ShortRow] | None:
    """A row for each that was read; None where nothing was, or where one of them does not hold all that is kept."""
    if best is None:
        return None
    ids, logits, masses = best
    rows = [ShortRow(*row).ordered() for row in zip(ids, logits, masses.tolist(), strict=True)]
    # Of a row that is no numbers there is enough: the chooser says so.
    is_enough = all(not np.isfinite(row.mass) or row.num_kept(filters) is not None for row in rows)
    return rows if is_enough else None
