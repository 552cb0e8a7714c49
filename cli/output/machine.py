"""What a report says about where it was made: the machine and the versions, by words that identify nobody."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def describe_machine() -> dict[str, object]:
    """System, processor and number of cores."""
    from mirrorsd.devices.layouts import processor_name

    return {"system": platform.platform(), "processor": processor_name(), "cores": os.cpu_count()}


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
