"""What a report says about where it was made: the machine and the versions, by words that identify nobody."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_FLAVOURS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-qnn", "onnxruntime-trt-rtx")
_PACKAGES = ("mirrorsd", "numpy", *_FLAVOURS, "openvino", "tokenizers")


def describe_machine() -> dict[str, object]:
    """System, processor and number of cores."""
    return {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that generation uses, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
