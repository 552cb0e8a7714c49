"""The devices of this machine in detail: their full names, drivers and memory, as far as anybody says.

Owns: asking OpenVINO and NVIDIA's own tool. Does not own: whether a card fits (`inventory`), which versions are known
to fail (`known_versions`).
"""

import csv
import os
import subprocess
import sys
from dataclasses import dataclass

import openvino as ov

from mirrorsd.device_maps import DeviceMap, TargetPlacement
from mirrorsd.device_maps.providers import ON_CUDA
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS

_MB = 1 << 20
_QUERY = ("uuid", "name", "driver_version", "memory.total", "memory.free", "compute_cap")
_NPU_PACKAGE = "intel-level-zero-npu"
_MEMORY_PROPERTIES = ("GPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_TOTAL_MEM_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDetail:
    """One device; `driver` is empty and the sizes (bytes) are None where nobody says.

    `extra` holds what else matters for it, such as a GPU's compute capability.
    """

    device: str
    full_name: str
    driver: str = ""
    memory_total: int | None = None
    memory_free: int | None = None
    extra: str = ""


def device_names(card: DeviceMap) -> list[str]:
    """What the devices of a card are called, drivers included, processors left out; `unknown` where nobody says."""
    found = [] if card.target.is_on_cpu else [target_name(card.target)]
    devices = [part.device for part in (card.draft, card.exit) if not part.emulated]
    return found + [_openvino_name(one) for one in dict.fromkeys(devices) if one not in ("CPU", "target")]


def target_name(target: TargetPlacement) -> str:
    """What the device of a target is called, with its driver; `unknown` where nobody says."""
    if target.runtime == "openvino":
        return _openvino_name(f"{target.device}.{target.device_id}")
    if target.provider not in ON_CUDA:
        return _provider_devices(target.provider) or "unknown"
    gpu = cuda_gpu(target.device_id)
    return f"{gpu.full_name} {gpu.driver} {gpu.extra}" if gpu else "unknown"


def _openvino_name(device: str) -> str:
    core = new_core()
    driver = _npu_driver(core) if device == "NPU" else _property(core, device, "DRIVER_VERSION")
    return f"{_property(core, device, 'FULL_DEVICE_NAME')} {driver}".strip() or "unknown"


def _provider_devices(provider: str) -> str:
    """The devices that ONNX Runtime lists under a provider, by its vendor and number."""
    import onnxruntime as ort

    devices = [device.device for device in ort.get_ep_devices() if device.ep_name == provider]
    return ", ".join(f"{device.vendor} {device.vendor_id:x}:{device.device_id:x}" for device in devices)


def hardware_details() -> tuple[DeviceDetail, ...]:
    """Every device that OpenVINO sees, then every NVIDIA GPU."""
    return (*_openvino_devices(new_core()), *nvidia_gpus())


def _openvino_devices(core: ov.Core) -> list[DeviceDetail]:
    try:
        devices = core.available_devices
    except OPENVINO_ERRORS:  # one device's broken driver, of which `device_inventory` tells
        devices = ["CPU"]
    return [
        DeviceDetail(
            device=f"OpenVINO {name}",
            full_name=_property(core, name, "FULL_DEVICE_NAME"),
            driver=_npu_driver(core) if name == "NPU" else _property(core, name, "DRIVER_VERSION"),
            memory_total=_memory(core, name),
            extra=_capabilities(core, name),
        )
        for name in devices
    ]


def _npu_driver(core: ov.Core) -> str:
    """The NPU driver's version as its releases are called: its package's on Linux, `32.0.100.N` on Windows.

    OpenVINO itself gives one number, `N` on Windows and a date on Linux; that is what is left where nobody knows more.
    """
    found = _property(core, "NPU", "NPU_DRIVER_VERSION")
    if sys.platform == "win32":
        return f"32.0.100.{found}" if found.isdigit() else found
    command = ["dpkg-query", "--show", "--showformat=${Version}", _NPU_PACKAGE]
    try:
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip() or found
    except (OSError, subprocess.SubprocessError):
        return found


def nvidia_gpus() -> list[DeviceDetail]:
    """NVIDIA's GPUs in the order of its tool; none where that is not installed or does not answer."""
    return [gpu for _, gpu in _listed_gpus()]


def cuda_gpu(number: int) -> DeviceDetail | None:
    """The GPU that CUDA counts as `number`; None where nobody can say.

    CUDA counts those that CUDA_VISIBLE_DEVICES names, in its order. Without an identifier it numbers them by speed,
    unless CUDA_DEVICE_ORDER asks for the order of the bus, which NVIDIA's tool has.
    """
    listed = _listed_gpus()
    is_by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.full_name for _, gpu in listed}) < 2
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(place) for place in range(len(listed))] if visible is None else visible.replace(" ", "").split(",")
    name = names[number] if number < len(names) else ""
    if name.isdigit():
        return listed[int(name)][1] if is_by_bus and int(name) < len(listed) else None
    named = [gpu for identifier, gpu in listed if name and identifier.startswith(name)]
    return named[0] if len(named) == 1 else None


def cuda_memory(number: int) -> int | None:
    """Free bytes of the GPU that CUDA counts as `number`; the least of all, where nobody can say which it is."""
    gpu = cuda_gpu(number)
    sizes = [one.memory_free for one in ([gpu] if gpu else nvidia_gpus())]
    return min((size for size in sizes if size is not None), default=None)


def _listed_gpus() -> list[tuple[str, DeviceDetail]]:
    """NVIDIA's GPUs by their identifiers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in row] for row in csv.reader(lines) if len(row) == len(_QUERY)]
    return [
        (
            identifier,
            DeviceDetail(
                device=f"NVIDIA GPU {number}",
                full_name=name,
                driver=driver,
                memory_total=_megabytes(total),
                memory_free=_megabytes(free),
                extra=f"compute capability {capability}",
            ),
        )
        for number, (identifier, name, driver, total, free, capability) in enumerate(rows)
    ]


def _megabytes(text: str) -> int | None:
    return int(text) * _MB if text.isdigit() else None


def _memory(core: ov.Core, name: str) -> int | None:
    found = (_property(core, name, key) for key in _MEMORY_PROPERTIES)
    return next((int(size) for size in found if size.isdigit()), None)


def _capabilities(core: ov.Core, name: str) -> str:
    try:
        found = core.get_property(name, "OPTIMIZATION_CAPABILITIES")
    except OPENVINO_ERRORS:
        return ""
    return ", ".join(str(capability) for capability in found)


def _property(core: ov.Core, device: str, name: str) -> str:
    try:
        return str(core.get_property(device, name))
    except OPENVINO_ERRORS:
        return ""
