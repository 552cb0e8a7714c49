"""What only real devices can show. Everything here skips, with a reason, where the device is absent."""

from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import load_device_map
from mirrorsd.device_maps.providers import ON_CUDA
from mirrorsd.runtime import device_inventory, missing_devices

PROMPT = "Once upon a time"
SETTINGS = {"max_new_tokens": 48, "ignore_eos": True}


def load_or_skip(request: pytest.FixtureRequest, card: str) -> MirrorPipeline:
    device_map = load_device_map(card)
    problems = missing_devices(device_map, device_inventory())
    if problems:
        pytest.skip(f"{card}: {'; '.join(problems)}")
    bundle = request.getfixturevalue("half_bundle" if device_map.target.provider in ON_CUDA else "tiny_bundle")
    return MirrorPipeline.load(bundle, device_map=card, speculation={"pad_rows_to": 8})


@pytest.mark.parametrize(
    "card",
    [
        "npu-emulated",
        pytest.param("cuda-cpu", marks=pytest.mark.gpu),
        pytest.param("cuda-npu", marks=[pytest.mark.gpu, pytest.mark.npu]),
        pytest.param("tensorrt-rtx", marks=pytest.mark.gpu),
        pytest.param("igpu-cpu", marks=pytest.mark.gpu),
        pytest.param("igpu-npu", marks=[pytest.mark.gpu, pytest.mark.npu]),
    ],
)
def test_methods_agree_on_the_device(request: pytest.FixtureRequest, card: str) -> None:
    with load_or_skip(request, card) as pipe:
        plain = pipe.generate(PROMPT, **SETTINGS, method="plain")
        for method in ("serial", "mirror", "auto"):
            assert pipe.generate(PROMPT, **SETTINGS, method=method).token_ids == plain.token_ids


@pytest.mark.gpu
def test_cuda_computes_what_the_cpu_computes(request: pytest.FixtureRequest) -> None:
    with load_or_skip(request, "cuda-cpu") as pipe:
        on_gpu = pipe.generate(PROMPT, **SETTINGS, method="plain")
        assert any("CUDAExecutionProvider" in line for line in pipe.placement)
    with MirrorPipeline.load(request.getfixturevalue("half_bundle"), device_map="cpu") as pipe:
        on_cpu = pipe.generate(PROMPT, **SETTINGS, method="plain")
    assert on_gpu.token_ids[:8] == on_cpu.token_ids[:8]


@pytest.mark.gpu
def test_captured_passes_equal_plain_ones_on_the_gpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    texts = []
    for graphs in ("true", "false"):
        card = tmp_path / f"graphs-{graphs}.toml"
        target = f'[target]\nprovider = "CUDAExecutionProvider"\ngraphs = {graphs}\n'
        card.write_text(target, encoding="utf-8")
        with load_or_skip(request, str(card)) as pipe:
            texts.append([pipe.generate(PROMPT, **SETTINGS, method=method).token_ids for method in ("plain", "mirror")])
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_logits_stay_on_the_gpu_unless_sampling_asks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_or_skip(request, "cuda-cpu") as pipe:
        read: list[tuple[int, ...]] = []
        from mirrorsd.devices.onnxruntime.stage import Tensor

        whole = Tensor.read
        monkeypatch.setattr(Tensor, "read", lambda tensor: read.append(tuple(tensor.value.shape())) or whole(tensor))
        vocabulary = pipe.manifest.target.shape.vocab_size
        pipe.generate(PROMPT, **SETTINGS, method="mirror")
        assert not [shape for shape in read if vocabulary in shape]
        pipe.generate(PROMPT, **SETTINGS, method="mirror", do_sample=True, temperature=1.0, seed=1)
        assert [shape for shape in read if vocabulary in shape]


@pytest.mark.npu
def test_every_draft_shape_compiles_for_the_npu(tiny_bundle: Path) -> None:
    from mirrorsd.cli.commands.compile import check_shapes

    card = load_device_map("cuda-npu")
    problems = [line for line in missing_devices(card, device_inventory()) if "NPU" in line]
    if problems:
        pytest.skip("; ".join(problems))
    assert all(check.is_fine for check in check_shapes(tiny_bundle, card))
