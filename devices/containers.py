"""What a container leaves of the machine: the kernel's control groups bound memory and processors (Linux).

Docker, Kubernetes and systemd set such bounds; what the system itself says of memory and cores is the whole machine's.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def total_memory(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes of memory that this process may use, free or not."""
    limits = [limit for limit, _ in _memory(root, own)]
    return min([int(psutil.virtual_memory().total), *limits])


def available_memory(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Bytes of memory that this process may still take."""
    left = [max(0, limit - used) for limit, used in _memory(root, own)]
    return min([int(psutil.virtual_memory().available), *left])


def processors(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """How many processors' time this process may use; None where nothing bounds it."""
    found = []
    for folder in _folders(root, own, "cpu"):
        quota, period = (_text(folder / "cpu.max").split() or ["max", "1"])[:2]
        if quota == "max":
            quota, period = _text(folder / "cpu.cfs_quota_us") or "-1", _text(folder / "cpu.cfs_period_us") or "1"
        if int(quota) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limits, and what is used of each: what files have in memory can be had again.

    Where there is no bound, version 1 has a limit of more than any machine's memory.
    """
    for folder in _folders(root, own, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            lines = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
            cached = int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))
            yield int(limit), int(used) - cached


def _folders(root: Path, own: Path, kind: str) -> Iterator[Path]:
    """The groups that this process is in, and those around them, of both versions."""
    for line in _text(own).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        base = root / kinds if kinds else root
        place = base / path.lstrip("/")
        yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(base))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
