"""Layouts: which cores, and so how many threads, target and draft get where both compute on the processor.

`apart` is what the card says of target and draft: side by side, on cores of their own. `shared` gives both all of the
card's shared cores, by turns: serial and plain decoding have the whole processor, mirror decoding contends for it.
Owns which processor there is, which of its cores this process may use, which layout is in force and what it makes of a
card. Which layout is fastest is for `mirrorsd tune` to find.
"""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from mirrorsd.device_maps import DeviceMap, DraftPlacement, TargetPlacement
from mirrorsd.device_maps.card import MAX_THREADS, SHARED
from mirrorsd.devices.containers import processors
from mirrorsd.graphs.errors import ConfigError

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class Cores(NamedTuple):
    """Numbers of cores to pin to (none where the system does not let us), and how many threads they carry."""

    numbers: tuple[int, ...]
    num_threads: int


class Layout(NamedTuple):
    """A card as it is laid out in force, and why this way."""

    name: str
    device_map: DeviceMap
    reason: str


def choose_layout(card: DeviceMap, asked: str | None = None, tuned: str | None = None) -> Layout:
    """The layout that the caller asks for; else `tuned`, the one that was found fastest; else the card's first.

    Raises:
        ConfigError: the card does not permit the layout asked for.
    """
    if asked is not None and asked not in card.layouts:
        raise ConfigError(f"layout is {asked!r}; device map {card.name!r} permits {', '.join(card.layouts)}.")
    name, reason = card.layouts[0], f"the first of {card.name}"
    if asked is not None:
        name, reason = asked, "as named"
    elif tuned in card.layouts:
        name, reason = str(tuned), "the fastest when tuned"
    elif len(card.layouts) > 1:
        reason += "; `mirrorsd tune` finds the fastest"
    return Layout(name, lay_out(card, name), f"layout: {name} ({reason})")


def lay_out(card: DeviceMap, layout: str, cores: Cores | None = None) -> DeviceMap:
    """The card with the cores and threads that a layout gives to target and draft.

    Where a card that may share its cores names none, `apart` gives a physical core to each, if there are two.

    Args:
        card: a device map.
        layout: `apart` or `shared`.
        cores: what the process may use; looked up by default.
    """
    if layout != SHARED:
        is_open = SHARED in card.layouts and not card.target.cores and not card.draft.cores
        first, second, *_ = (*(cores or usable_cores()).numbers, None, None) if is_open else (None, None)
        if first is None or second is None:
            return card
        return replace(card, target=replace(card.target, cores=(first,)), draft=replace(card.draft, cores=(second,)))
    named = Cores(card.shared_cores, len(card.shared_cores)) if card.shared_cores else None
    numbers, num_threads = named or cores or usable_cores()
    threads = min(num_threads, MAX_THREADS)
    target = replace(card.target, cores=numbers, threads=threads)
    return replace(card, target=target, draft=replace(card.draft, cores=numbers, threads=threads))


def thread_cores(placement: TargetPlacement | DraftPlacement, *, in_onnxruntime: bool) -> tuple[int, ...]:
    """Where the target's or the draft's own thread runs.

    ONNX Runtime pins its pool to all cores but the first (`providers`) and computes on the calling thread too:
    that one keeps to the first core, or two of them would meet on one core and wait for each other.
    """
    is_pool_pinned = in_onnxruntime and len(placement.cores) == placement.threads
    return placement.cores[:1] if is_pool_pinned else placement.cores


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
    share = processors()
    if share is not None and share < len(numbers):  # of all of them, so that no thread keeps to one
        return Cores((), max(1, int(share)))
    return Cores(tuple(numbers), len(numbers))
