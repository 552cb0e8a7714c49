"""Huge pages: only large memory that is in use, only what has come since, and not a byte changed."""

import mmap
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mirrorsd.devices.huge_pages import new_regions, private_regions, regions_now, use_huge_pages

_SIZE = 16 << 20
_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.fixture
def has_huge_pages() -> None:
    """Skip where the system gives none."""
    enabled = _FOLDER / "enabled"
    if sys.platform != "linux" or not enabled.is_file() or "[never]" in enabled.read_text(encoding="ascii"):
        pytest.skip("this system gives no huge pages")
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("Linux collapses pages on request from 6.1 on")
    if not regions_now():
        pytest.skip("this system does not say what memory a process has")


def _private_memory(size: int) -> np.ndarray:
    """Bytes on small pages: numpy's own large arrays ask for huge ones."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


class Held(NamedTuple):
    """What the system holds of a region, in bytes."""

    start: int
    end: int
    resident: int
    huge: int


def _held() -> list[Held]:
    """Of every region, by one reading: other threads of the process may move their bounds between two."""
    found, bounds, numbers = list[Held](), (0, 0), dict[str, int]()
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if "-" in name.partition(" ")[0]:
            first, last = name.partition(" ")[0].split("-")
            bounds, numbers = (int(first, 16), int(last, 16)), {}
        elif value.endswith(" kB"):
            numbers[name] = 1024 * int(value.removesuffix(" kB"))
            if name == "AnonHugePages":
                found.append(Held(*bounds, numbers["Rss"], numbers[name]))
    return found


def _region_of(array: np.ndarray) -> Held:
    middle = array.ctypes.data + array.nbytes // 2
    return next(region for region in _held() if region.start <= middle < region.end)


@pytest.mark.usefixtures("has_huge_pages")
def test_memory_in_use_is_collapsed_and_keeps_its_contents() -> None:
    before = regions_now()
    array = _private_memory(_SIZE)
    array[:] = np.arange(_SIZE) % 251
    assert _region_of(array).huge == 0
    assert use_huge_pages(new_regions(before)) >= _SIZE - (2 << 20)  # all but its two ends
    assert _region_of(array).huge >= _SIZE - (2 << 20)
    assert np.array_equal(array, np.arange(_SIZE) % 251)


@pytest.mark.usefixtures("has_huge_pages")
def test_who_has_closed_everything_is_not_kept_waiting() -> None:
    before = regions_now()
    array = _private_memory(_SIZE)
    array[:] = 1
    assert use_huge_pages(new_regions(before), lambda _: True) == 0
    assert _region_of(array).huge == 0


@pytest.mark.usefixtures("has_huge_pages")
def test_pieces_rest_longer_than_they_take() -> None:
    before = regions_now()
    array = _private_memory(_SIZE)
    array[:] = 1
    rests: list[float] = []
    use_huge_pages(new_regions(before), lambda seconds: rests.append(seconds) or False)
    assert len(rests) > 1
    assert rests[0] == 0.0 < min(rests[1:])


@pytest.mark.usefixtures("has_huge_pages")
def test_what_is_used_of_a_region_is_collapsed_though_most_is_not() -> None:
    before = regions_now()
    array = _private_memory(_SIZE)
    array[: _SIZE // 4] = 1
    resident = _region_of(array).resident
    use_huge_pages(new_regions(before))
    region = _region_of(array)
    assert region.huge >= _SIZE // 4 - (2 << 20)
    assert region.resident - resident < 2 << 20


@pytest.mark.usefixtures("has_huge_pages")
def test_what_was_there_before_is_left_alone() -> None:
    array = _private_memory(_SIZE)
    array[:] = 1
    use_huge_pages(new_regions(regions_now()))
    assert _region_of(array).huge == 0


@pytest.mark.usefixtures("has_huge_pages")
def test_memory_that_is_hardly_used_stays_small() -> None:
    before = regions_now()
    array = _private_memory(_SIZE)
    array[:: 2 * mmap.PAGESIZE] = 1
    resident = sum(region.resident for region in _held())
    use_huge_pages(new_regions(before))
    assert sum(region.resident for region in _held()) - resident < _SIZE // 4


def test_memory_of_files_and_what_cannot_be_written_is_none_of_ours() -> None:
    maps = "\n".join(
        f"{start:x}-{start + 0x1000:x} {kind} 00000000 00:00 0 {name}"
        for start, kind, name in (
            (0x1000, "rw-p", "[heap]"),
            (0x2000, "rw-p", "/usr/lib/some.so"),
            (0x3000, "r--p", ""),
            (0x4000, "rw-s", ""),
            (0x5000, "rw-p", "[stack]"),
            (0x6000, "rw-p", ""),
        )
    )
    assert [region.start for region in private_regions(maps)] == [0x1000, 0x6000]
