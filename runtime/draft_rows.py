"""Filling the static inputs of a draft pass: ids, positions, mask and tip rows, padded to a bucket."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirrorsd.graphs.contract import MASKED
from mirrorsd.runtime.draft_session import RowBlock


class DraftInputs:
    """Host views of one bucket's inputs: `ids[1,N] positions[1,N] mask[1,1,N,C+N] tip_rows[R]`."""

    def __init__(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.float32],
        tip_rows: NDArray[np.int64],
    ) -> None:
        self._ids, self._positions, self._mask, self._tip_rows = ids[0], positions[0], mask[0, 0], tip_rows
        self.num_rows = ids.shape[1]
        self.num_tips = tip_rows.shape[0]
        self.capacity = mask.shape[3] - self.num_rows
        self._counting = np.arange(self.num_rows)
        self._causal = np.where(np.tri(self.num_rows, dtype=np.bool_), 0.0, MASKED).astype(mask.dtype)
        self._own_columns = self.capacity + self._counting

    def tip_positions(self, num_tips: int) -> NDArray[np.int64]:
        """Positions of the first `num_tips` tips of what was filled in."""
        positions: NDArray[np.int64] = self._positions[self._tip_rows[:num_tips]]
        return positions

    def fill(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> None:
        """Write the rows of a pass; padding rows see only themselves and are nobody's tip.

        Capacity 6, two chain rows in cache, one lead row (position 2) and a branch row that sees it: the branch row's
        mask is open at slots 0, 1, at row 0 (column 6) and at itself (column 7).

        >>> rows = np.zeros((1, 2), np.int64)
        >>> inputs = DraftInputs(rows, rows.copy(), np.zeros((1, 1, 2, 8), np.float32), np.zeros(1, np.int64))
        >>> inputs.fill([RowBlock([7], 2, 2), RowBlock([8], 3, 2, (), 1)], [1])
        >>> (inputs._mask == 0).astype(int).tolist()
        [[1, 1, 0, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1, 1]]
        """
        mask, capacity = self._mask, self.capacity
        mask.fill(MASKED)
        row = 0
        for block in blocks:
            size = len(block.tokens)
            stop = row + size
            self._ids[row:stop] = block.tokens
            np.add(self._counting[:size], block.first_position, out=self._positions[row:stop])
            mask[row:stop, : block.chain_visible] = 0.0
            if block.extra_slots:
                mask[row:stop, list(block.extra_slots)] = 0.0
            if block.lead_rows:
                mask[row:stop, capacity : capacity + block.lead_rows] = 0.0
            mask[row:stop, capacity + row : capacity + stop] = self._causal[:size, :size]
            row = stop
        if row < self.num_rows:
            self._ids[row:] = 0
            self._positions[row:] = 0
            mask[self._counting[row:], self._own_columns[row:]] = 0.0
        self._tip_rows[: len(tip_rows)] = tip_rows
        self._tip_rows[len(tip_rows) :] = 0
