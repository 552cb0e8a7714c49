"""Which processor there is, and which of its cores this process may use."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class Cores(NamedTuple):
    """Numbers of cores to pin to (none where the system does not let us), and how many threads they carry."""

    numbers: tuple[int, ...]
    num_threads: int


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What this processor is called, as its system says: the model's name, or an Arm core's numbers.

    Args:
        cpuinfo: Linux's list of processors.
    """
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
        for names in (("model name",), ("CPU implementer", "CPU part", "CPU variant", "CPU revision")):
            if found := " ".join(fields[name] for name in names if fields.get(name)):
                return found
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip()
    return platform.processor() or platform.machine()


def usable_cores(siblings: str = _SIBLINGS) -> Cores:
    """One processor number for every physical core that this process may use.

    Where nobody says which numbers share a core, each number counts as one. Where threads cannot be pinned (Windows,
    macOS), the system is asked how many cores there are.

    Args:
        siblings: pattern of the files that say which numbers share a core; "0,4" beside cpu0 and cpu4.
    """
    if not hasattr(os, "sched_getaffinity"):
        return Cores((), psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    seen: set[str] = set()
    numbers: list[int] = []
    for number in sorted(os.sched_getaffinity(0)):
        path = Path(siblings.format(number))
        core = path.read_text(encoding="ascii").strip() if path.is_file() else str(number)
        if core not in seen:
            seen.add(core)
            numbers.append(number)
    return Cores(tuple(numbers), len(numbers))
