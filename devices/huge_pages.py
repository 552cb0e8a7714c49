"""Weights on huge pages: a pass reads all of them once, and with pages of 4 KiB much of that time goes into addresses.

On Linux, what loading has left in large private memory is collapsed into huge pages (`MADV_COLLAPSE`, Linux 6.1). It
moves no address and changes no byte; where the system has none to give, or is older, everything stays as it is.
`bench/studies/huge_pages.py` measures what it brings. Weights that a runtime computes on straight from a mapped file
stay so.
"""

import ctypes
import re
from collections.abc import Callable, Collection
from mmap import PAGESIZE
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

_MAPS = Path("/proc/self/maps")
"""Not `smaps`, which says more: to count what is resident takes a tenth of a second in a large program."""
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \d+ *(.*)")
_OF_NOBODY = ("", "[heap]")
_MADV_COLLAPSE = 25
_LEAST_BYTES = 4 << 20
_LEAST_RESIDENT = 0.9
"""A collapsed page is resident as a whole: stacks and caches that are hardly used are left alone."""


class Region(NamedTuple):
    """A stretch of private memory of this process that no file is behind; its size in bytes."""

    start: int
    size: int


def private_regions(maps: str) -> list[Region]:
    """The writable ones of `/proc/self/maps`.

    >>> private_regions('''7f00-8f00 rw-p 00000000 00:00 0
    ... 9f00-af00 r--p 00000000 08:01 12   /lib/some.so''')
    [Region(start=32512, size=4096)]
    """
    headers = [_HEADER.fullmatch(line.rstrip()) for line in maps.splitlines()]
    bounds = [(int(found[1], 16), int(found[2], 16)) for found in headers if found and found[3] in _OF_NOBODY]
    return [Region(start, stop - start) for start, stop in bounds]


def regions_now() -> list[Region]:
    """The private memory of this process; empty where the system does not say."""
    try:
        return private_regions(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def new_regions(before: Collection[Region]) -> list[Region]:
    """The large memory that has come since `before`. A region that has grown since counts as new, as a whole."""
    known = set(before)
    return [region for region in regions_now() if region.size >= _LEAST_BYTES and region not in known]


def use_huge_pages(due: Collection[Region], rest: Callable[[float], bool] = lambda _: False) -> int:
    """Collapse what is in use of this memory into huge pages; how many bytes of it are on some then.

    May be called from any thread, while others use that memory.

    Args:
        due: The memory.
        rest: Is told how many seconds a piece took, may wait, and says whether to leave off.
    """
    page_bytes = _huge_page_bytes()
    if not (due and page_bytes):
        return 0
    advise = _of_the_system("madvise", ctypes.c_int)
    seconds, num_bytes = 0.0, 0
    for region in due:
        first, last = -(-region.start // page_bytes), (region.start + region.size) // page_bytes
        for start in range(first * page_bytes, last * page_bytes, page_bytes):
            if not _is_in_use(start, page_bytes):
                continue
            if rest(seconds):
                return 0
            began = perf_counter()
            is_refused = advise(start, page_bytes, _MADV_COLLAPSE)  # which leaves the pages as they are
            num_bytes += 0 if is_refused else page_bytes
            seconds = perf_counter() - began
    return num_bytes


def _huge_page_bytes() -> int:
    """A huge page's size; 0 where the system has none."""
    try:
        return int(_SIZE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _is_in_use(start: int, size: int) -> bool:
    """Whether most pages there are resident: a collapsed one is as a whole."""
    found = (ctypes.c_ubyte * (size // PAGESIZE))()
    failed = _of_the_system("mincore", ctypes.POINTER(ctypes.c_ubyte))(start, size, found)
    return not failed and bytes(found).count(1) >= _LEAST_RESIDENT * len(found)


def _of_the_system(name: str, last: Any) -> Callable[..., int]:
    """A function of the C library that takes an address, a length and something of type `last`."""
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, last)
    return cast("Callable[..., int]", function)
