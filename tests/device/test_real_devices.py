"""What only real devices can show. Everything here skips, with a reason, where the device is absent."""

from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import load_device_map
from mirrorsd.runtime import device_inventory, missing_devices

PROMPT = "Once upon a time"
SETTINGS = {"max_new_tokens": 48, "ignore_eos": True}


def load_or_skip(bundle: Path, card: str) -> MirrorPipeline:
    problems = missing_devices(load_device_map(card), device_inventory())
    if problems:
        pytest.skip(f"{card}: {'; '.join(problems)}")
    return MirrorPipeline.load(bundle, device_map=card, speculation={"pad_rows_to": 8})


@pytest.mark.parametrize(
    "card",
    [
        "npu-emulated",
        pytest.param("cuda-cpu", marks=pytest.mark.gpu),
        pytest.param("cuda-npu", marks=[pytest.mark.gpu, pytest.mark.npu]),
    ],
)
def test_methods_agree_on_the_device(tiny_bundle: Path, card: str) -> None:
    with load_or_skip(tiny_bundle, card) as pipe:
        plain = pipe.generate(PROMPT, **SETTINGS, method="plain")
        for method in ("serial", "mirror", "auto"):
            assert pipe.generate(PROMPT, **SETTINGS, method=method).token_ids == plain.token_ids


@pytest.mark.gpu
def test_cuda_computes_what_the_cpu_computes(tiny_bundle: Path) -> None:
    with load_or_skip(tiny_bundle, "cuda-cpu") as pipe:
        on_gpu = pipe.generate(PROMPT, **SETTINGS, method="plain")
        assert any("CUDAExecutionProvider" in line for line in pipe.placement)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        on_cpu = pipe.generate(PROMPT, **SETTINGS, method="plain")
    assert on_gpu.token_ids[:8] == on_cpu.token_ids[:8]
