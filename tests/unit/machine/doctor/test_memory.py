"""What a bundle is expected to need, and what is free, by device."""

from dataclasses import replace
from pathlib import Path

import pytest

from mirrorsd.cli.commands.machine import doctor
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices import hardware
from mirrorsd.devices.cache_bytes import cache_bytes
from mirrorsd.devices.hardware import DeviceDetail
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.manifest import FileEntry, Head, Manifest
from mirrorsd.machine.doctor import memory
from mirrorsd.machine.doctor.memory import SYSTEM, free_memory, memory_needs


@pytest.fixture
def manifest(bundle: Path) -> Manifest:
    found = read_bundle(bundle)
    found.files["target/weights.bin"] = FileEntry(bytes=1000, sha256="")
    found.files["draft/draft.bin"] = FileEntry(bytes=100, sha256="")
    return found


def test_parts_are_counted_where_they_live(manifest: Manifest) -> None:
    _, target, draft = memory_needs(manifest, load_device_map("cuda-npu"))
    assert (target.device, draft.device) == ("NVIDIA GPU 0", "NPU")
    shape = manifest.target.shape
    head = shape.vocab_size * shape.hidden_size * 4
    assert (target.weights, target.copies) == (1000, len(manifest.target.exits) * head), "every exit has its own"
    assert memory_needs(manifest, load_device_map("cpu"))[1].copies == 0
    assert target.caches == 2 * 2 * 1 * 64 * 4 * 4
    # The NPU computes these fp32 weights in 16 bits.
    assert (draft.weights, draft.copies) == (50, 100)
    assert draft.total == 150 + 2 * 1 * 64 * 4 * 4 + draft.workspace


def test_caches_of_heads_count_with_the_targets(manifest: Manifest) -> None:
    """Keys and values of two layers, one head of width 4, 64 rows of four bytes."""
    shape = HeadShape(taps=(1,), length=4, num_candidates=1, num_layers=2, num_kv_heads=1, head_dim=4)
    source = manifest.draft.source
    head = Head(kind="block", file="x", source=source, shape=shape, vocabulary="own", num_tokens=32)
    headed = replace(manifest, heads=(head,))
    assert cache_bytes(headed) - cache_bytes(manifest) == 2 * 2 * 1 * 4 * 64 * 4
    needs = [memory_needs(one, load_device_map("cpu"))[1].caches for one in (headed, manifest)]
    assert needs[0] - needs[1] == 2 * 2 * 1 * 4 * 64 * 4


@pytest.mark.parametrize(
    ("card", "target_device", "draft_device"),
    [
        ("cpu", SYSTEM, SYSTEM),
        ("npu-emulated", SYSTEM, SYSTEM),
        ("igpu-npu", "GPU", "NPU"),
        ("cuda-cpu", "NVIDIA GPU 0", SYSTEM),
        ("directml-npu", "DmlExecutionProvider", "NPU"),
    ],
)
def test_devices_of_cards(manifest: Manifest, card: str, target_device: str, draft_device: str) -> None:
    runtimes, target, draft = memory_needs(manifest, load_device_map(card))
    assert (runtimes.device, target.device, draft.device) == (SYSTEM, target_device, draft_device)


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory(SYSTEM)
    assert free is None or free > 1 << 20
    assert free_memory("NPU") is None
    gpus = [
        DeviceDetail(device=f"NVIDIA GPU {number}", full_name=name, memory_free=free << 20)
        for number, (name, free) in enumerate((("T400", 512), ("RTX 6000", 40_000)))
    ]
    monkeypatch.setattr(hardware, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "cuda_gpu", {0: gpus[1]}.get)
    assert free_memory("NVIDIA GPU 0") == 40_000 << 20
    assert free_memory("NVIDIA GPU 1") == 512 << 20, "nobody can say which it is: the least that it may be"
    monkeypatch.setattr(hardware, "nvidia_gpus", list)
    assert free_memory("NVIDIA GPU 1") is None


def test_doctor_warns_of_too_little(bundle: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_bundle", lambda _: manifest)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 20 if device == SYSTEM else None)
    system, gpu = doctor.check_memory(bundle, "cuda-cpu")
    assert system.advice.startswith("too little")
    assert "MB of 1 free (runtimes" in system.found
    assert (gpu.name, gpu.advice) == ("NVIDIA GPU 0, cuda-cpu", "")
    assert "MB of ? free (target" in gpu.found


def test_a_large_draft_on_a_processor_is_counted_once(manifest: Manifest) -> None:
    _, _, small = memory_needs(manifest, load_device_map("cpu"))
    manifest.files["draft/draft.bin"] = FileEntry(bytes=1 << 30, sha256="")
    _, _, large = memory_needs(manifest, load_device_map("cpu"))
    num_shapes = len(manifest.draft.buckets) * len(manifest.draft.capacities)
    assert small.copies == 100 * num_shapes
    assert (large.weights, large.copies) == (1 << 29, 1 << 30)
    _, _, on_npu = memory_needs(manifest, load_device_map("cuda-npu"))
    assert on_npu.copies == num_shapes << 30
