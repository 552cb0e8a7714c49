"""Memory that was used and is free: glibc keeps it for itself unless it is asked, so a process grows for hours.

Buffers of many sizes come and go on many threads. What is free between them stays with the process, and each of
glibc's arenas keeps its own: a few more megabytes every minute, though what is in use is as much as ever.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from time import monotonic

EVERY_S = 60.0
"""Giving back stops allocations for milliseconds; in a minute a busy process frees some megabytes anew."""
_ARENA_MAX = -8
"""What `mallopt` calls the most arenas."""
_given = monotonic()


def is_due() -> bool:
    """Whether the last time was long ago."""
    return monotonic() - _given >= EVERY_S


def give_back() -> None:
    """Return what is free to the system; does nothing without glibc."""
    global _given
    _given = monotonic()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def few_arenas() -> None:
    """Have threads share as many arenas as there are cores, not eight times as many; for a process of one's own.

    To be called before it has many threads. `python bench/claims/soak.py` shows what it holds over time.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(_ARENA_MAX, max(2, os.cpu_count() or 1))


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
