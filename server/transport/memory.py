"""Memory that a long request took, and that nobody needs any more: glibc keeps it for itself unless it is asked."""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from functools import cache

LONG_BODY = 1 << 16
"""Bytes of a body after which memory is given back: asking for it stops allocations for milliseconds."""


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


async def give_back() -> None:
    """Return what is free to the system, on a thread; does nothing without glibc."""
    trim = _trim()
    if trim is not None:
        await asyncio.to_thread(trim, 0)
