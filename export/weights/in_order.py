"""Work on parts of tensors, several at a time, whose results come in the parts' order.

Owns: how many threads an export works on weights with. numpy lets others run while it computes on large arrays, so that
threads do; what they work on must not use them itself, or all could wait for each other.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Part = TypeVar("Part")
Result = TypeVar("Result")

_PART_NUMBERS = 1 << 20
"""Of rows that are worked on at a time: their floats stay in a processor's cache from one step to the next."""


def in_order(work: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
    """Do `work` on all `parts`, as many at a time as PyTorch has threads; as many results wait at most.

    What numpy does about numbers that are none goes with the context, as in the caller's thread.
    """
    pending = deque[Future[Result]]()
    for part in parts:
        pending.append(_threads().submit(copy_context().run, work, part))
        if len(pending) > torch.get_num_threads():
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def parts_of_rows(chunks: Iterable[Array]) -> Iterator[Array]:
    """The rows `[n, K]` of all chunks, fewer at a time.

    >>> [len(part) for part in parts_of_rows([np.zeros((3, 1 << 19)), np.zeros((1, 1 << 21))])]
    [2, 1, 1]
    """
    for rows in chunks:
        step = max(1, _PART_NUMBERS // max(1, rows.shape[1]))
        yield from (rows[start : start + step] for start in range(0, len(rows), step))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "weights")
