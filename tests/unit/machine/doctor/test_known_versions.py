"""Pairs of versions that are known to fail: recognised where they are, silent where they are not."""

import subprocess
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from mirrorsd.cli.commands.machine.doctor import check_versions
from mirrorsd.devices import hardware
from mirrorsd.devices.hardware import DeviceDetail, cuda_gpu, hardware_details, nvidia_gpus
from mirrorsd.machine.doctor.known_versions import KNOWN_BAD, find_known_bad


def npu(driver: str) -> DeviceDetail:
    return DeviceDetail(device="OpenVINO NPU", full_name="Intel(R) AI Boost", driver=driver)


@pytest.mark.parametrize(
    ("versions", "device", "words"),
    [
        ({"openvino": "2025.4.1"}, npu("32.0.100.4724"), "Level Zero loader 1.28.2"),
        ({"openvino": "2026.4.1"}, npu("32.0.100.4724"), ""),
        ({"openvino": "2025.4.1"}, npu("32.0.100.4023"), ""),
        ({"openvino": "2026.4.1"}, npu("1.16.0.20250328-14132024782"), "does not come back"),
        ({"openvino": "2026.4.1"}, npu("1.17.0"), ""),
        ({"openvino": "2026.4.1"}, npu("1.2.0"), "MAPPED_INFERENCE_VERSION"),
        (
            {"onnxruntime-gpu": "1.24.1"},
            DeviceDetail(device="NVIDIA GPU 0", full_name="RTX", driver="520.61.05"),
            "needs NVIDIA driver 525",
        ),
        ({"onnxruntime-gpu": "1.24.1"}, DeviceDetail(device="NVIDIA GPU 1", full_name="RTX", driver="525.60.13"), ""),
        ({"onnxruntime-gpu": "1.31.1"}, DeviceDetail(device="NVIDIA GPU 0", full_name="T4", driver="550.9"), "CUDA 13"),
        ({"onnxruntime-gpu": "1.18.1", "mirrorsd": "0.1.0"}, npu(""), "built for CUDA 11"),
        ({}, npu("1.16.0"), ""),
    ],
)
def test_what_is_known_is_recognised(versions: dict[str, str], device: DeviceDetail, words: str) -> None:
    found = find_known_bad(versions, [device])
    assert [words in finding.what for finding in found] == ([True] if words else [])
    check = check_versions(versions, [device])[0]
    assert bool(check.advice) == bool(words)


def test_every_pair_has_its_reason_and_source() -> None:
    for pair in KNOWN_BAD:
        assert pair.source.startswith("https://")
        assert pair.what
        assert pair.advice
        assert SpecifierSet(pair.versions) and SpecifierSet(pair.with_versions) is not None


def test_nvidia_s_own_tool_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "GPU-ab1, NVIDIA RTX 4070, 551.23, 8188, 7000, 8.9\nGPU-ab2, NVIDIA T400, 551.23, [N/A], [N/A], 7.5\nbroken\n"
    )
    monkeypatch.setattr(hardware.subprocess, "check_output", lambda *_, **__: line)
    first, second = nvidia_gpus()
    assert (first.device, first.driver, first.memory_free) == ("NVIDIA GPU 0", "551.23", 7000 << 20)
    assert (second.extra, second.memory_total) == ("compute capability 7.5", None)

    def missing(*_: Any, **__: Any) -> str:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(hardware.subprocess, "check_output", missing)
    assert nvidia_gpus() == []


@pytest.mark.parametrize(
    ("visible", "order", "number", "name"),
    [
        (None, None, 0, None),  # by speed, which nobody tells
        (None, "PCI_BUS_ID", 1, "NVIDIA T400"),
        ("1", "PCI_BUS_ID", 0, "NVIDIA T400"),
        ("1,0", "PCI_BUS_ID", 1, "NVIDIA RTX 4070"),
        ("GPU-ab2, GPU-ab1", None, 0, "NVIDIA T400"),
        ("GPU-ab", None, 0, None),
        ("1", "PCI_BUS_ID", 1, None),
        ("", "PCI_BUS_ID", 0, None),
        ("7", "PCI_BUS_ID", 0, None),
    ],
)
def test_cuda_counts_gpus_otherwise_than_nvidia_s_tool(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, number: int, name: str | None
) -> None:
    line = "GPU-ab1, NVIDIA RTX 4070, 551.23, 8188, 7000, 8.9\nGPU-ab2, NVIDIA T400, 551.23, 1024, 900, 7.5\n"
    monkeypatch.setattr(hardware.subprocess, "check_output", lambda *_, **__: line)
    for variable, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
    found = cuda_gpu(number)
    assert (found.full_name if found else None) == name


def test_this_machine_has_a_processor() -> None:
    (processor, *_) = hardware_details()
    assert processor.device == "OpenVINO CPU"
    assert processor.full_name
