"""Memory that was used and is free: glibc keeps it for itself unless it is asked, so a process grows for hours.

Buffers of many sizes come and go on many threads. What is free between them stays with the process, a few more
megabytes every hour, though what is in use is as much as ever.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from time import monotonic

EVERY_S = 60.0
"""Giving back stops allocations for milliseconds; in a minute a busy process frees some megabytes anew."""
_given = monotonic()


def is_due() -> bool:
    """Whether the last time was long ago."""
    return monotonic() - _given >= EVERY_S


def give_back() -> None:
    """Return what is free to the system; does nothing without glibc."""
    global _given
    _given = monotonic()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
