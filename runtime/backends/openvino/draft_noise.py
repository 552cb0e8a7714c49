"""The noise of sampling as the draft's graph takes it: a row of the vocabulary per position, the rows used in turn.

Owns: which position's noise stands in which row. Does not own: the noise (`noise`, `choosing`).
"""

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.graphs.contract import DraftShape
from mirrorsd.runtime.sampling.chooser import NoiseSource


class DraftNoise:
    """One session's noise `[P, V]`, in a tensor that all of its requests share.

    Position `p` has row `p % P`. A row that holds another position's noise is written when it is asked for. With no
    source, all rows are zero: the likeliest tokens are best.
    """

    def __init__(self, shape: DraftShape) -> None:
        """Make zeros; `shape` has noise rows."""
        self._rows = np.zeros((shape.num_noise_rows, shape.vocab_size), dtype=np.float32)
        self._positions = np.full(shape.num_noise_rows, -1, dtype=np.int64)
        self._source: NoiseSource | None = None
        self.tensor = ov.Tensor(self._rows, shared_memory=True)

    @property
    def is_silent(self) -> bool:
        """Whether the request has no noise: all rows are zero."""
        return self._source is None

    def follow(self, source: NoiseSource | None) -> None:
        """Begin a request whose noise comes from `source`, or one without noise."""
        if self._source is not None:
            self._rows.fill(0.0)
        self._positions.fill(-1)
        self._source = source

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that hold the noise of `positions`, of the same shape; writes those that are missing.

        With 4 rows, positions 5 and 8 have rows 1 and 0.
        """
        num_rows, vocab_size = self._rows.shape
        rows = positions % num_rows
        if self._source is not None:
            for position in np.unique(positions[self._positions[rows] != positions]).tolist():
                self._rows[position % num_rows] = self._source(position, vocab_size)
                self._positions[position % num_rows] = position
        return rows
