"""Pairs of versions that are known to fail together, each with what happens and who says so.

Only failures that somebody has reported and that this project can recognise from versions are listed; a machine that
matches none may still fail, and one that matches may have been repaired by hand: this warns, it forbids nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirrorsd.runtime.doctor.hardware import DeviceDetail

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """A part at versions `first .. last` (both included) beside another part at versions `with_first .. with_last`.

    `part` and `beside` name a package, or start with a device whose driver counts: `driver of NPU`.
    """

    part: str
    first: Version
    last: Version
    beside: str
    with_first: Version
    with_last: Version
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


_ANY: tuple[Version, Version] = ((0,), (9999,))

KNOWN_BAD = (
    KnownBad(
        part="driver of NPU",
        first=(32, 0, 100, 4723),
        last=(32, 0, 100, 4778),
        beside="openvino",
        with_first=(2025, 4),
        with_last=(2025, 4, 9),
        what="the driver's Level Zero loader 1.28.2 crashes the process (Windows)",
        advice="use NPU driver 32.0.100.4023, or a later OpenVINO",
        source="https://github.com/openvinotoolkit/openvino/issues/36457",
    ),
    KnownBad(
        part="driver of NPU",
        first=(1, 13),
        last=(1, 16),
        beside="openvino",
        with_first=_ANY[0],
        with_last=_ANY[1],
        what="an NPU that lost a workload does not come back until its kernel module is loaded again (Linux)",
        advice="after a device-lost error: sudo rmmod intel_vpu && sudo modprobe intel_vpu; or a newer kernel",
        source="https://github.com/intel/linux-npu-driver/issues/87",
    ),
    KnownBad(
        part="driver of NPU",
        first=(1, 0),
        last=(1, 2),
        beside="openvino",
        with_first=(2024, 0),
        with_last=_ANY[1],
        what="compiling fails with MAPPED_INFERENCE_VERSION is NOT compatible with the ELF (firmware too old)",
        advice="install one release of the NPU driver whole: firmware, compiler and Level Zero part together",
        source="https://github.com/intel/linux-npu-driver/issues/28",
    ),
    KnownBad(
        part="onnxruntime-gpu",
        first=(1, 19),
        last=(1, 26),
        beside="driver of NVIDIA GPU",
        with_first=(0,),
        with_last=(524,),
        what="this ONNX Runtime is built for CUDA 12, which needs NVIDIA driver 525 or later",
        advice="update the NVIDIA driver",
        source="https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
    ),
    KnownBad(
        part="onnxruntime-gpu",
        first=(1, 0),
        last=(1, 18),
        beside="mirrorsd",
        with_first=_ANY[0],
        with_last=_ANY[1],
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
        if _within(one, pair.first, pair.last) and _within(other, pair.with_first, pair.with_last):
            found = f"{pair.part} {_text(one)} with {pair.beside} {_text(other)}"
            findings.append(Finding(found=found, what=pair.what, advice=pair.advice, source=pair.source))
    return findings


def number(text: str) -> Version:
    """The numbers of a version, in order.

    >>> number("2026.4.1-22982-rc"), number("32.0.100.4723"), number("1.13.0.2025")
    ((2026, 4, 1), (32, 0, 100, 4723), (1, 13, 0, 2025))
    """
    found = re.match(r"[0-9]+(\.[0-9]+)*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _within(version: Version, first: Version, last: Version) -> bool:
    """Whether `first <= version <= last`, the last compared only as far as it goes: 1.16.3 is within .. (1, 16)."""
    return first <= version and version[: len(last)] <= last


def _family(device: str) -> str:
    """`OpenVINO NPU` -> `NPU`, `NVIDIA GPU 0` -> `NVIDIA GPU`."""
    return device.removeprefix("OpenVINO ").rstrip("0123456789. ")


def _text(version: Version) -> str:
    return ".".join(map(str, version))
