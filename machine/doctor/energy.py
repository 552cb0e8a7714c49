"""Joules that the machine has used, where it counts them: RAPL's counters under Linux, NVIDIA's through NVML.

Owns: which counters there are, and differences between two readings. They count the whole chip, whoever used it: for a
figure that means something the machine must have nothing else to do. Does not own: what is run in between.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCounter:
    """One counter: `read` gives joules from some beginning on, less than `wraps_at`, where it starts again.

    Where it fails it gives none (NaN).
    """

    name: str
    read: Callable[[], float]
    wraps_at: float = float("inf")

    def since(self, before: float) -> float:
        """Joules since a reading; the counter may have started again once.

        >>> EnergyCounter(name="package-0", read=lambda: 2.0, wraps_at=10.0).since(7.0)
        5.0
        """
        used = self.read() - before
        return used if used >= 0 else used + self.wraps_at


class EnergyMeter:
    """All counters of this machine, read together."""

    def __init__(self) -> None:
        """Find the counters that can be read; RAPL's are root's alone on most systems."""
        self._counters = (*_processor_counters(POWERCAP), *_nvidia_counters())
        self._before = [0.0] * len(self._counters)

    @property
    def names(self) -> tuple[str, ...]:
        """What is counted; empty where this machine tells nothing."""
        return tuple(counter.name for counter in self._counters)

    def start(self) -> None:
        """Joules count from here."""
        self._before = [counter.read() for counter in self._counters]

    def joules(self) -> float | None:
        """Joules since `start`, of all counters together; None where there is none, or one fails meanwhile."""
        if not self._counters:
            return None
        found = sum(counter.since(before) for counter, before in zip(self._counters, self._before, strict=True))
        return None if math.isnan(found) else found


def _processor_counters(powercap: Path) -> list[EnergyCounter]:
    """Every package, and the memory beside it (a domain within the package's): no joule is in two of them."""
    counters = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
            is_counted = name.startswith("package") or name == "dram"
            if is_counted and int((folder / "energy_uj").read_text(encoding="ascii")) >= 0:
                counters.append(_of_folder(folder, name))
        except (OSError, ValueError):
            continue
    return counters


def _of_folder(folder: Path, name: str) -> EnergyCounter:
    def read() -> float:
        try:
            return int((folder / "energy_uj").read_text(encoding="ascii")) * _MICRO
        except (OSError, ValueError):
            return math.nan

    range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
    return EnergyCounter(name=name, read=read, wraps_at=range_uj * _MICRO)


def _nvidia_counters() -> list[EnergyCounter]:
    """NVIDIA's GPUs, where `nvidia-ml-py` is installed and the driver counts."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        return []
    return [
        EnergyCounter(name=f"GPU {number}", read=partial(_nvidia_joules, nvml, handle))
        for number, handle in enumerate(handles)
    ]


def _nvidia_joules(nvml: Any, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * _MILLI
    except nvml.NVMLError:  # a GPU that was lost, or a driver that was renewed
        return math.nan
