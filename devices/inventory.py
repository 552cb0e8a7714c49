"""What this machine has, whether a device map fits it, which one `auto` picks. Nothing is substituted silently."""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from mirrorsd.device_maps import DeviceMap, TargetPlacement, builtin_names, load_device_map
from mirrorsd.device_maps.providers import PROVIDERS
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Manifest

AUTO_ORDER = ("cuda-npu", "cuda-cpu", "webgpu-npu", "webgpu-cpu", "igpu-npu", "igpu-cpu", "cpu")
ONNX_PACKAGES = (
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-trt-rtx", "onnxruntime-webgpu"),
    *("onnxruntime-openvino", "onnxruntime-qnn", "onnxruntime-rocm", "onnxruntime-migraphx"),
)
"""The packages that ONNX Runtime comes as; one of them should be installed, for they overwrite each other's files."""

_DRIVERS = {
    "NPU": " (install the Intel NPU driver)",
    "GPU": " (install Intel's graphics driver with its compute runtime)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInventory:
    """Devices that could be used: ONNX Runtime providers, OpenVINO devices, and the processor's cores.

    `openvino_problem` says why OpenVINO did not list its devices: then its processor's is taken to be there alone.
    """

    providers: tuple[str, ...]
    openvino_devices: tuple[str, ...]
    num_cores: int
    has_npu_plugin: bool
    openvino_problem: str = ""


class DeviceChoice(NamedTuple):
    """A device map that fits, and one line per map that was looked at on the way."""

    device_map: DeviceMap
    reasons: list[str]


def device_inventory() -> DeviceInventory:
    """Look at the machine; without ONNX Runtime there are no providers.

    Raises:
        DeviceError: OpenVINO cannot be opened, or ONNX Runtime is damaged.
    """
    from mirrorsd.devices.openvino.core import new_core
    from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS

    with raised_as(DeviceError, "OpenVINO cannot be opened", OPENVINO_ERRORS):
        core = new_core()
    try:
        core.get_versions("NPU")
        has_npu_plugin = True
    except OPENVINO_ERRORS:
        has_npu_plugin = False
    devices, problem = ("CPU",), ""
    try:
        devices = tuple(core.available_devices)
    except OPENVINO_ERRORS as error:  # one device's broken driver; the processor needs none
        problem = str(error).strip()
    return DeviceInventory(
        providers=_installed_providers(),
        openvino_devices=devices,
        num_cores=os.cpu_count() or 1,
        has_npu_plugin=has_npu_plugin,
        openvino_problem=problem,
    )


def _installed_providers() -> tuple[str, ...]:
    try:
        import onnxruntime
    except ImportError:
        return ()
    if not hasattr(onnxruntime, "get_available_providers"):  # a folder without its program
        raise DeviceError(
            "ONNX Runtime is damaged: its folder is there without its program, as where one of two packages was "
            f"removed. {how_to_install(PROVIDERS['CPUExecutionProvider'].package)}"
        )
    return tuple(onnxruntime.get_available_providers())


def runtime_versions() -> dict[str, str]:
    """Versions of what computes here: packages as installed, and ONNX Runtime's as it says itself."""
    found = {}
    for name in ("mirrorsd", *ONNX_PACKAGES, "openvino"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(ImportError, AttributeError):
        import onnxruntime

        found["ONNX Runtime"] = onnxruntime.__version__
    return found


def how_to_install(package: str) -> str:
    """What to type for ONNX Runtime as `package` has it: packages that are there would overwrite its files."""
    there = [name for name in ONNX_PACKAGES if name in runtime_versions()]
    first = f"First: pip uninstall {' '.join(there)}; then: " if there else ""
    return f"{first}pip install {package}"


_NO_INTEGERS = (
    "this bundle's products are of integers, which are for ONNX Runtime's CPU provider; the target of device map {!r} "
    "is on another device. For it export with --products blocks, or run this bundle on device map 'cpu'"
)


def check_computes(device_map: DeviceMap, dtype: str) -> None:
    """Refuse a device map whose target cannot compute in `dtype`, with the precisions to export in for it.

    Raises:
        DeviceError: it cannot.
    """
    if reason := cannot_compute(device_map, dtype):
        raise DeviceError(reason)


def cannot_compute(device_map: DeviceMap, dtype: str) -> str:
    """Why the target of a device map cannot compute in `dtype`; empty if it can.

    ONNX Runtime's CUDA provider has attention (`GroupQueryAttention`) in float16 and bfloat16 alone. Its CPU provider
    has neither products nor attention in bfloat16, OpenVINO's frontend no such attention. Products of "integers" are
    exact on ONNX Runtime's CPU provider alone.
    """
    target = device_map.target
    if dtype == "integers":
        return "" if target.runtime == "onnxruntime" and target.is_on_cpu else _NO_INTEGERS.format(device_map.name)
    is_cuda = (target.runtime, target.provider) == ("onnxruntime", "CUDAExecutionProvider")
    if is_cuda and dtype == "float32":
        return (
            "this bundle's target computes in float32; ONNX Runtime's CUDAExecutionProvider of device map "
            f"{device_map.name!r} has its attention in float16 and bfloat16 only. For this device export it with "
            "--precision fp16 or bf16, or int8 or int4 with --compute fp16, or run this bundle on another device map"
        )
    if is_cuda or dtype != "bfloat16":
        return ""
    where = target.provider if target.runtime == "onnxruntime" else f"OpenVINO's {target.device}"
    return (
        f"this bundle's target computes in bfloat16, which {where} of device map {device_map.name!r} cannot; it runs "
        "on ONNX Runtime's CUDAExecutionProvider (cuda-cpu, cuda-npu). For this device export it with --precision "
        "fp32 or fp16, or int8 or int4 with --compute fp32 or fp16"
    )


def cannot_run(device_map: DeviceMap, bundle: Manifest) -> str:
    """Why a bundle's models cannot run where a device map has them, if its devices are there; empty if they can."""
    if reason := cannot_compute(device_map, bundle.target.computes_in):
        return reason
    target, kept = device_map.target, bundle.target.shape.kept_on_processor
    if kept and not (target.runtime == "onnxruntime" and target.provider == "CPUExecutionProvider"):
        return (
            f"this bundle's target has {kept}, which run on ONNX Runtime on the processor only; device map "
            f"{device_map.name!r} has the target elsewhere. Choose one with the target on the processor"
        )
    if bundle.draft.is_for_processors and (device_map.draft.device != "CPU" or device_map.draft.emulated):
        return (
            f"this bundle's draft is in {bundle.draft.precision}, which are for a processor; device map "
            f"{device_map.name!r} has the draft on {device_map.draft.device}. Choose one with the draft on the CPU, or "
            "export the bundle again with --draft-precision int8"
        )
    return ""


def cannot_take_trees(card: DeviceMap, bundle: Manifest) -> str:
    """Why this bundle's target cannot verify siblings on a card; empty if it can."""
    from mirrorsd.devices.onnxruntime.masked_graph import why_not

    if card.target.runtime != "onnxruntime":
        return f"the target of {card.name} runs on {card.target.runtime}, which has no mask for it"
    if card.target.is_on_cpu:
        return (
            f"the target of {card.name} runs on the processor, where such rows differ from plain decoding's in their "
            "last bits, and cost time"
        )
    return why_not(bundle.target)


def missing_devices(device_map: DeviceMap, inventory: DeviceInventory) -> list[str]:
    """Why a device map does not fit this machine, one sentence each; empty if it fits."""
    target, draft = device_map.target, device_map.draft
    if target.runtime == "openvino":
        problems = _missing_openvino("target", target.device, inventory, target.device_id)
    else:
        problems = _missing_provider(target, inventory)
    problems += _missing_part("draft", draft.device, draft.emulated, inventory)
    if device_map.exit.device != "target":
        problems += _missing_part("exit", device_map.exit.device, device_map.exit.emulated, inventory)
    return problems


def _missing_part(part: str, device: str, is_emulated: bool, inventory: DeviceInventory) -> list[str]:
    if not is_emulated:
        return _missing_openvino(part, device, inventory)
    if not inventory.has_npu_plugin:
        return [f"the {part} needs OpenVINO's NPU plugin; this installation has none"]
    return []


def _missing_provider(target: TargetPlacement, inventory: DeviceInventory) -> list[str]:
    if not inventory.providers:
        return [_no_onnx_runtime()]
    if target.provider not in inventory.providers:
        provider = PROVIDERS[target.provider]
        where = f"{provider.system} only. " if provider.system else ""
        return [
            f"the target needs ONNX Runtime's {target.provider}; this installation has "
            f"{', '.join(inventory.providers)} ({where}{how_to_install(provider.package)})"
        ]
    unreachable = PROVIDERS[target.provider].unreachable
    if unreachable and not _has_room(target):
        return [f"the target needs {unreachable.format(device_id=target.device_id)}"]
    return []


def _no_onnx_runtime() -> str:
    return f"ONNX Runtime is not installed: pip install {PROVIDERS['CPUExecutionProvider'].package} (or [cuda])"


def _missing_openvino(part: str, device: str, inventory: DeviceInventory, number: int = 0) -> list[str]:
    """Why OpenVINO's device of a kind and number is not there; the only one of its kind has no number in its name."""
    wanted = f"{device}.{number}" if number else device
    if any(f"{found}.".startswith(f"{wanted}.") for found in inventory.openvino_devices):
        return []
    seen = ", ".join(inventory.openvino_devices) or "none"
    why = f": {inventory.openvino_problem}" if inventory.openvino_problem else _DRIVERS.get(device, "")
    return [f"the {part} needs OpenVINO's {wanted}; it sees {seen}{why}"]


def _has_room(target: TargetPlacement) -> bool:
    """Whether a tensor of one number finds room on that GPU.

    What ONNX Runtime lists as devices is no answer: in containers and virtual machines its list may lack GPUs that the
    provider computes on.
    """
    from mirrorsd.devices.onnxruntime.device import place_of

    try:
        place_of(target).tensor((1,), "float32")
    except DeviceError:
        return False
    return True


def choose_device_map(
    name: str, inventory: DeviceInventory | None = None, *, bundle: Manifest | None = None
) -> DeviceChoice:
    """Resolve a device map's name or path; `auto` takes the first of `AUTO_ORDER` that fits.

    Args:
        name: what was asked for.
        inventory: what the machine has; found out if not given.
        bundle: what is to run there: `auto` passes over device maps that cannot run it.

    Raises:
        ConfigError: no such device map, or a faulty card.
        DeviceError: the map's devices are absent and none of its own fall-backs fits.
    """
    inventory = inventory or device_inventory()
    if name == "auto" and not inventory.providers:
        raise DeviceError(f"{_no_onnx_runtime()}.")
    reasons: list[str] = []
    if name == "auto":
        candidates = [candidate for candidate in AUTO_ORDER if candidate in builtin_names()]
    else:
        candidates = [name, *load_device_map(name).fallbacks]
    for candidate in candidates:
        device_map = load_device_map(candidate)
        problems = missing_devices(device_map, inventory)
        if name == "auto" and not problems and bundle is not None:
            problems = [reason for reason in [cannot_run(device_map, bundle)] if reason]
        if not problems:
            caution = "" if device_map.tried else " Not tried on such a machine yet."
            reasons.append(f"{device_map.name}: fits; {device_map.description}{caution}")
            return DeviceChoice(device_map, reasons)
        reasons.append(f"{device_map.name}: {'; '.join(problems)}")
    raise DeviceError(
        f"Device map {name!r} does not fit this machine: {'; '.join(reasons)}. "
        "`mirrorsd devices` lists what is present; `--device-map auto` picks what fits."
    )
