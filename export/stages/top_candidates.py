"""The best `m` of a long row, fast on runtimes whose TopK is slow on wide rows.

Owns: the two-step selection. The result is exactly that of `torch.topk` (up to the order of equal values).
"""

from math import isqrt

import torch
from torch import Tensor

_SMALLEST_WIDE_ROW = 1024


def top_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best `count` values and their ids `[n, count]` of `scores [n, V]`, best first.

    The row is seen as `V / c` strided chunks of `c` entries: each of the best `count` entries lies in one of the
    `count` chunks with the largest maxima, so only those are searched. On OpenVINO's CPU plugin (one thread, 32 rows of
    4,096, m = 8) this took 0.15 ms where TopK over the whole row took 0.29; with m = 32, TopK alone took 3.1 ms.
    """
    num_rows, width = scores.shape
    chunk = 1 << (isqrt(width) // 2).bit_length() - 1
    num_chunks = width // chunk
    if width < _SMALLEST_WIDE_ROW or width % chunk or count >= num_chunks:
        return torch.topk(scores, count)
    chunks = scores.reshape(num_rows, chunk, num_chunks)
    _, best_chunks = torch.topk(chunks.amax(1), count)
    index = best_chunks[:, None, :].expand(num_rows, chunk, count)
    values, places = torch.topk(torch.gather(chunks, 2, index).reshape(num_rows, chunk * count), count)
    of_places = torch.arange(chunk)[:, None] * num_chunks + best_chunks[:, None, :]
    return values, torch.gather(of_places.reshape(num_rows, chunk * count), 1, places)
