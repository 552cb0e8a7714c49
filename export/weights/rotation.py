"""Rotating a row's numbers into each other, so that no single one is far larger than all others.

In a row of a model's hidden states a few numbers may be twenty times as large as the rest, and other ones in the next
row. One scale for the row then leaves the rest few of 256 levels. A Hadamard matrix spreads each number over all of its
block, and undoes itself: rows and weights are rotated alike, and the product stays what it was (QuaRot,
arXiv 2404.00456).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROTATED = 64
"""Numbers that are rotated together. Errors of Qwen2.5-Coder-1.5B's down projections, by row: 0.18 to 2.1 %, with
32 0.01 to 0.16 %, with 64 0.01 to 0.09 %, with 256 0.01 to 0.04 %, for four times the operations
(`bench/studies/weights/rotated_rows.py`)."""


def signs(size: int = ROTATED) -> npt.NDArray[np.float32]:
    """The Hadamard matrix `[size, size]` of ones and minus ones; `size` is a power of two.

    >>> signs(2).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def has_parts(width: int) -> bool:
    """Whether so many numbers are several parts of `ROTATED`, as rotating a row needs."""
    return width % ROTATED == 0 and width > ROTATED


def rotate(rows: Array, size: int = ROTATED) -> Array:
    """`rows` `[n, K]` with every `size` numbers rotated into each other, in float32; twice gives back what it was.

    >>> rotate(rotate(np.float32([[8, 0, 0, 4]]), 2), 2).tolist()
    [[8.0, 0.0, 0.0, 4.0]]
    """
    blocks = rows.astype(np.float32).reshape(-1, size)
    rotated: Array = (blocks @ signs(size) / np.sqrt(np.float32(size))).reshape(rows.shape)
    return rotated
