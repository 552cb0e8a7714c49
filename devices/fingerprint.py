"""What must be the same for a speed to be: a hash of machine, devices, versions and bundle."""

import hashlib
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from mirrorsd.device_maps import DeviceMap
from mirrorsd.devices.inventory import ONNX_PACKAGES
from mirrorsd.devices.layouts import processor_name
from mirrorsd.graphs import names


def fingerprint(bundle: Path, card: DeviceMap) -> str:
    """Hash of processor, cores, the card's devices and pace, the runtimes' versions and the bundle's manifest."""
    parts = [platform.machine(), processor_name(), str(os.cpu_count()), str(card.pace)]
    parts += [card.target.runtime, card.target.provider, card.target.device, card.draft.device, card.exit.device]
    if not (card.target.is_on_cpu and card.draft.is_on_cpu and card.exit.device == "target"):
        from mirrorsd.devices.hardware import device_names

        parts += device_names(card)
    for package in ("mirrorsd", *ONNX_PACKAGES, "openvino"):
        with suppress(metadata.PackageNotFoundError):
            parts.append(f"{package}={metadata.version(package)}")
    digest = hashlib.sha256("|".join(parts).encode())
    digest.update((bundle / names.MANIFEST_FILE).read_bytes())
    return digest.hexdigest()[:16]
