"""What a report says about where it was made: the machine and the versions, by words that identify nobody."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def describe_machine() -> dict[str, object]:
    """System, processor and number of cores; NVIDIA's GPUs, where there are any."""
    from mirrorsd.devices.hardware import nvidia_gpus
    from mirrorsd.devices.layouts import processor_name

    found: dict[str, object] = {"system": platform.platform(), "processor": processor_name(), "cores": os.cpu_count()}
    gpus = ", ".join(gpu.full_name for gpu in nvidia_gpus())
    return found | ({"gpu": gpus} if gpus else {})


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that generation uses, as far as they are installed."""
    from mirrorsd.devices.inventory import ONNX_PACKAGES

    versions = {"python": platform.python_version()}
    for package in ("mirrorsd", "numpy", *ONNX_PACKAGES, "openvino", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
