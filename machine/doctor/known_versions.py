"""Pairs of versions that are known to fail together, each with what happens and who says so.

Only failures that somebody has reported and that this project can recognise from versions are listed; a machine that
matches none may still fail, and one that matches may have been repaired by hand: this warns, it forbids nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mirrorsd.devices.hardware import DeviceDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """A part at some versions beside another part at some versions: specifiers as in requirements, "" for all.

    `part` and `beside` name a package, or start with a device whose driver counts: `driver of NPU`.
    """

    part: str
    versions: str
    beside: str
    with_versions: str
    what: str
    advice: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A known-bad pair that is here."""

    found: str
    what: str
    advice: str
    source: str


KNOWN_BAD = (
    KnownBad(
        part="driver of NPU",
        versions=">=32.0.100.4723,<=32.0.100.4778",
        beside="openvino",
        with_versions=">=2025.4,<2025.5",
        what="the driver's Level Zero loader 1.28.2 crashes the process (Windows)",
        advice="use NPU driver 32.0.100.4023, or a later OpenVINO",
        source="https://github.com/openvinotoolkit/openvino/issues/36457",
    ),
    KnownBad(
        part="driver of NPU",
        versions=">=1.13,<1.17",
        beside="openvino",
        with_versions="",
        what="an NPU that lost a workload does not come back until its kernel module is loaded again (Linux)",
        advice="after a device-lost error: sudo rmmod intel_vpu && sudo modprobe intel_vpu; or a newer kernel",
        source="https://github.com/intel/linux-npu-driver/issues/87",
    ),
    KnownBad(
        part="driver of NPU",
        versions=">=1.0,<1.3",
        beside="openvino",
        with_versions=">=2024.0",
        what="compiling fails with MAPPED_INFERENCE_VERSION is NOT compatible with the ELF (firmware too old)",
        advice="install one release of the NPU driver whole: firmware, compiler and Level Zero part together",
        source="https://github.com/intel/linux-npu-driver/issues/28",
    ),
    KnownBad(
        part="onnxruntime-gpu",
        versions=">=1.19,<1.27",
        beside="driver of NVIDIA GPU",
        with_versions="<525",
        what="this ONNX Runtime is built for CUDA 12, which needs NVIDIA driver 525 or later",
        advice="update the NVIDIA driver",
        source="https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
    ),
    KnownBad(
        part="onnxruntime-gpu",
        versions=">=1.27",
        beside="driver of NVIDIA GPU",
        with_versions="<580",
        what="this ONNX Runtime is built for CUDA 13, which needs NVIDIA driver 580 or later",
        advice="update the NVIDIA driver, or: pip install 'onnxruntime-gpu<1.27'",
        source="https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
    ),
    KnownBad(
        part="onnxruntime-gpu",
        versions="<1.19",
        beside="mirrorsd",
        with_versions="",
        what="built for CUDA 11 or cuDNN 8: with the libraries of CUDA 12 it does not load, and 1.19 on do the reverse",
        advice="pip install --upgrade 'mirrorsd[cuda]'",
        source="https://github.com/microsoft/onnxruntime/issues/21769",
    ),
)


def find_known_bad(versions: Mapping[str, str], devices: Sequence[DeviceDetail]) -> list[Finding]:
    """The known-bad pairs among installed packages (`name -> version`) and drivers."""
    there = {name: number(text) for name, text in versions.items()}
    drivers = {f"driver of {_family(device.device)}": number(device.driver) for device in devices if device.driver}
    there |= drivers
    findings = []
    for pair in KNOWN_BAD:
        one, other = there.get(pair.part), there.get(pair.beside)
        if one is None or other is None:
            continue
        if one in SpecifierSet(pair.versions) and other in SpecifierSet(pair.with_versions):
            found = f"{pair.part} {one} with {pair.beside} {other}"
            findings.append(Finding(found=found, what=pair.what, advice=pair.advice, source=pair.source))
    return findings


def number(text: str) -> Version | None:
    """The numbers that a version starts with; None where it starts with none.

    >>> [str(number(text)) for text in ("2026.4.1-22982-rc", "32.0.100.4723", "1.13.0.2025")]
    ['2026.4.1', '32.0.100.4723', '1.13.0.2025']
    """
    found = re.match(r"[0-9]+(\.[0-9]+)*", text.strip())
    return Version(found[0]) if found else None


def _family(device: str) -> str:
    """`OpenVINO NPU` -> `NPU`, `NVIDIA GPU 0` -> `NVIDIA GPU`."""
    return device.removeprefix("OpenVINO ").rstrip("0123456789. ")
