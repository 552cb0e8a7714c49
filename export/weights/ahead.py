"""Weights are read and packed on all of a processor's cores, some rows at a time and in order.

Owns: how much is computed ahead. Does not own: what is computed (`gguf_tensors.py`, `lazy_weight.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def computed_ahead(make: Callable[[Item], Made], items: Iterable[Item], *, threads: int = 1) -> Iterator[Made]:
    """Give `make(item)` of one item after the other, and compute the next ones on other `threads` meanwhile.

    As many results as there are threads are held beside the one that was given last. One thread makes them in order;
    several may only where `make` keeps nothing between two calls. `items` are iterated over by the caller's thread.
    NumPy lets go of Python's lock while it computes; what it was asked to pass over (`np.errstate`) holds there, too.

    >>> list(computed_ahead(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(threads, "mirrorsd-weights") as pool:
        waiting: deque[Future[Made]] = deque()
        for item in items:
            waiting.append(pool.submit(copy_context().run, make, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
