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

_MAPS = Path("/proc/self/smaps")
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \d+ *(.*)")
_OF_NOBODY = ("", "[heap]")
_MADV_COLLAPSE = 25
_LEAST_BYTES = 4 << 20
_LEAST_RESIDENT = 0.9
"""A collapsed page is resident as a whole: stacks and caches that are hardly used are left alone."""


class Region(NamedTuple):
    """A stretch of private memory of this process that no file is behind; sizes in bytes."""

    start: int
    size: int
    resident: int
    huge: int


def private_regions(smaps: str) -> list[Region]:
    """The writable ones of `/proc/self/smaps`.

    >>> private_regions('''7f00-8f00 rw-p 00000000 00:00 0
    ... Rss:       4 kB
    ... AnonHugePages:  0 kB
    ... 9f00-af00 r--p 00000000 08:01 12   /lib/some.so
    ... Rss:       4 kB
    ... ''')
    [Region(start=32512, size=4096, resident=4096, huge=0)]
    """
    found: list[Region] = []
    is_private = False
    for line in smaps.splitlines():
        if "-" in line.partition(" ")[0]:
            header = _HEADER.fullmatch(line.rstrip())
            is_private = header is not None and header[3] in _OF_NOBODY
            if header is not None and is_private:
                start, stop = int(header[1], 16), int(header[2], 16)
                found.append(Region(start, stop - start, 0, 0))
        elif is_private and line.startswith(("Rss:", "AnonHugePages:")):
            name, number, _ = line.split()
            field = "resident" if name == "Rss:" else "huge"
            found[-1] = found[-1]._replace(**{field: 1024 * int(number)})
    return found


def regions_now() -> list[Region]:
    """The private memory of this process; empty where the system does not say."""
    try:
        return private_regions(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def new_regions(before: Collection[Region]) -> list[Region]:
    """The large memory in use that has come since `before`. A region that has grown since counts as new, as a whole."""
    known = {(region.start, region.size) for region in before}
    return [
        region
        for region in regions_now()
        if region.resident >= _LEAST_BYTES and (region.start, region.size) not in known
    ]


def use_huge_pages(due: Collection[Region], rest: Callable[[float], bool] = lambda _: False) -> int:
    """Collapse this memory into huge pages; how many bytes of it are on some then.

    May be called from any thread, while others use that memory.

    Args:
        due: The memory.
        rest: Is told how many seconds a piece took, may wait, and says whether to leave off.
    """
    page_bytes = _huge_page_bytes()
    if not (due and page_bytes):
        return 0
    advise = _of_the_system("madvise", ctypes.c_int)
    seconds = 0.0
    for region in due:
        first, last = -(-region.start // page_bytes), (region.start + region.size) // page_bytes
        for start in range(first * page_bytes, last * page_bytes, page_bytes):
            if not _is_in_use(start, page_bytes):
                continue
            if rest(seconds):
                return 0
            began = perf_counter()
            advise(start, page_bytes, _MADV_COLLAPSE)  # a refusal leaves the pages as they are
            seconds = perf_counter() - began
    starts = {region.start for region in due}
    return sum(region.huge for region in regions_now() if region.start in starts)


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
