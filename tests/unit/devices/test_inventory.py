"""Which card fits which machine, said in words, and nothing substituted that a card does not list."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from mirrorsd.device_maps import DeviceMap, TargetPlacement, load_device_map
from mirrorsd.devices import hardware
from mirrorsd.devices import inventory as devices
from mirrorsd.devices.hardware import hardware_details
from mirrorsd.devices.inventory import (
    AUTO_ORDER,
    DeviceInventory,
    check_computes,
    choose_device_map,
    device_inventory,
    missing_devices,
)
from mirrorsd.devices.onnxruntime import device
from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.devices.onnxruntime.providers import provider_options, session_options
from mirrorsd.devices.onnxruntime.stage import Place
from mirrorsd.devices.openvino import core
from mirrorsd.graphs.errors import DeviceError


def test_bfloat16_is_refused_where_it_cannot_be_computed() -> None:
    check_computes(load_device_map("cuda-cpu"), "bfloat16")
    check_computes(load_device_map("cpu"), "float16")
    with pytest.raises(DeviceError, match="bfloat16, which CPUExecutionProvider of device map 'cpu' cannot"):
        check_computes(load_device_map("cpu"), "bfloat16")
    with pytest.raises(DeviceError, match="which OpenVINO's GPU of device map 'igpu-cpu' cannot"):
        check_computes(load_device_map("igpu-cpu"), "bfloat16")


@pytest.mark.parametrize("card", ["cuda-cpu", "cuda-npu"])
def test_cuda_takes_float16_and_bfloat16_alone(card: str) -> None:
    for dtype in ("float16", "bfloat16"):
        check_computes(load_device_map(card), dtype)
    with pytest.raises(DeviceError, match=r"in float32.*--precision fp16 or bf16, or int8 or int4 with --compute fp16"):
        check_computes(load_device_map(card), "float32")


def test_auto_passes_over_a_card_that_cannot_compute_the_bundle() -> None:
    inventory = machine("CPU", "NPU", providers=CUDA)
    halves, floats = (bundle_with(computes_in) for computes_in in ("float16", "float32"))
    assert choose_device_map("auto", inventory, bundle=halves).device_map.name == "cuda-npu"
    choice = choose_device_map("auto", inventory, bundle=floats)
    assert choice.device_map.name == "cpu"
    assert choice.reasons[0].startswith("cuda-npu: this bundle's target computes in float32")
    assert choose_device_map("cuda-cpu", inventory, bundle=floats).device_map.name == "cuda-cpu", "asked for by name"


def test_auto_passes_over_a_card_whose_target_cannot_run_the_bundle() -> None:
    choice = choose_device_map("auto", machine("CPU", "GPU"), bundle=bundle_with("float32", "mixtures of experts"))
    assert choice.device_map.name == "cpu"
    assert "mixtures of experts, which run on ONNX Runtime on the processor only" in " ".join(choice.reasons)
    assert choose_device_map("auto", machine("CPU", "GPU"), bundle=bundle_with("float32")).device_map.name == "igpu-cpu"


def test_a_gpu_without_a_driver_is_found_out_by_asking_it_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the provider is listed and there is no GPU: ONNX Runtime itself refuses the tensor."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has the provider")
    monkeypatch.undo()
    problems = missing_devices(load_device_map("cuda-cpu"), machine("CPU", providers=CUDA))
    assert len(problems) == 1
    assert problems[0].startswith("the target needs NVIDIA GPU 0; it gives no memory (check `nvidia-smi`")


def test_a_gpu_that_gives_memory_is_used_although_nobody_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(onnxruntime, "get_ep_devices", list)
    monkeypatch.setattr(Place, "tensor", lambda place, *_: place.device_id)
    assert missing_devices(load_device_map("cuda-cpu"), machine("CPU", providers=CUDA)) == []


def machine(*openvino: str, providers: tuple[str, ...] = ("CPUExecutionProvider",)) -> DeviceInventory:
    return DeviceInventory(providers=providers, openvino_devices=openvino, num_cores=8, has_npu_plugin=True)


def bundle_with(computes_in: str, kept_on_processor: str = "") -> Any:
    """What a bundle's manifest says of its models, as far as a device map is chosen by it."""
    shape = SimpleNamespace(kept_on_processor=kept_on_processor)
    return SimpleNamespace(
        target=SimpleNamespace(computes_in=computes_in, shape=shape), draft=SimpleNamespace(is_for_processors=False)
    )


@pytest.fixture(autouse=True)
def _cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_has_room", lambda _: True)


CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("inventory", "card"),
    [
        (machine("CPU", "GPU.0", "NPU", providers=CUDA), "cuda-npu"),
        (machine("CPU", "GPU.0", providers=CUDA), "cuda-cpu"),
        (machine("CPU", "GPU.0", "NPU"), "igpu-npu"),
        (machine("CPU", "GPU"), "igpu-cpu"),
        (machine("CPU", "NPU"), "cpu"),
        (machine("CPU"), "cpu"),
    ],
)
def test_auto_takes_the_first_that_fits_and_says_what_it_passed(inventory: DeviceInventory, card: str) -> None:
    choice = choose_device_map("auto", inventory)
    assert choice.device_map.name == card
    assert [reason.split(":")[0] for reason in choice.reasons] == list(AUTO_ORDER[: AUTO_ORDER.index(card) + 1])
    assert choice.reasons[-1].startswith(f"{card}: fits")


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("cuda-npu", ["CUDAExecutionProvider", 'pip install "mirrorsd[cuda]"', "the draft needs OpenVINO's NPU"]),
        ("igpu-cpu", ["the target needs OpenVINO's GPU; it sees CPU (install Intel's graphics driver"]),
        ("igpu-npu", ["the target needs OpenVINO's GPU", "install the Intel NPU driver"]),
        ("directml-npu", ["DmlExecutionProvider", 'pip install "mirrorsd[directml]"']),
        ("tensorrt-rtx", ["NvTensorRTRTXExecutionProvider", "onnxruntime-trt-rtx"]),
    ],
)
def test_a_missing_device_is_named_with_what_to_do(card: str, words: list[str]) -> None:
    with pytest.raises(DeviceError, match=f"Device map '{card}' does not fit this machine") as caught:
        choose_device_map(card, machine("CPU"))
    assert not [word for word in words if word not in str(caught.value)]


def test_an_npu_without_its_plugin_is_named() -> None:
    inventory = DeviceInventory(
        providers=("CPUExecutionProvider",), openvino_devices=("CPU",), num_cores=2, has_npu_plugin=False
    )
    problems = missing_devices(load_device_map("npu-emulated"), inventory)
    assert problems == ["the draft needs OpenVINO's NPU plugin; this installation has none"]


def test_only_listed_cards_stand_in(tmp_path: Path) -> None:
    text = '[target]\nruntime = "openvino"\ndevice = "GPU"\n'
    (tmp_path / "strict.toml").write_text(text, encoding="utf-8")
    (tmp_path / "lenient.toml").write_text(f'fallbacks = ["cuda-cpu", "cpu"]\n{text}', encoding="utf-8")
    with pytest.raises(DeviceError, match="the target needs OpenVINO's GPU"):
        choose_device_map(str(tmp_path / "strict.toml"), machine("CPU"))
    choice = choose_device_map(str(tmp_path / "lenient.toml"), machine("CPU"))
    assert choice.device_map.name == "cpu"
    assert [reason.split(":")[0] for reason in choice.reasons] == ["lenient", "cuda-cpu", "cpu"]


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("CPUExecutionProvider", {}),
        ("CUDAExecutionProvider", {"device_id": "1", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}),
        ("NvTensorRTRTXExecutionProvider", {"device_id": "1"}),
        ("DmlExecutionProvider", {"device_id": "1"}),
    ],
)
def test_no_provider_but_the_cpu_s_falls_back_to_the_cpu(provider: str, options: dict[str, str]) -> None:
    placement = TargetPlacement(provider=provider, device_id=1 if options else 0)
    assert provider_options(placement) == options
    session = session_options(placement)
    if provider != "CPUExecutionProvider":
        assert session.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
    assert session.enable_mem_pattern == (provider not in {"CPUExecutionProvider", "DmlExecutionProvider"})


def test_cuda_options_follow_what_the_stages_compute_in_and_whose_stream_it_is() -> None:
    placement = TargetPlacement(provider="CUDAExecutionProvider", graphs=True)
    options = provider_options(placement, dtype="float16", captures=True, stream=4096)
    assert "use_tf32" not in options
    expected = {"enable_cuda_graph": "1", "has_user_compute_stream": "1", "user_compute_stream": "4096"}
    assert expected.items() <= options.items()


@pytest.mark.parametrize("name", ["igpu-npu", "igpu-cpu", "directml-npu"])
def test_cards_that_were_not_tried_say_so(name: str) -> None:
    card: DeviceMap = load_device_map(name)
    text = (Path(devices.__file__).parents[1] / "device_maps" / f"{name}.toml").read_text(encoding="utf-8")
    assert "Not yet run on" in text
    assert card.fallbacks == ()
    assert not card.target.is_on_cpu


def test_a_gpu_is_there_by_its_number(tmp_path: Path) -> None:
    card = tmp_path / "second.toml"
    card.write_text('[target]\nruntime = "openvino"\ndevice = "GPU"\ndevice_id = 1\n', encoding="utf-8")
    second = load_device_map(str(card))
    assert missing_devices(second, machine("CPU", "GPU")) == [
        "the target needs OpenVINO's GPU.1; it sees CPU, GPU (install Intel's graphics driver with its compute runtime)"
    ]
    assert missing_devices(second, machine("CPU", "GPU.0", "GPU.1")) == []
    assert missing_devices(load_device_map("igpu-cpu"), machine("CPU", "GPU.0", "GPU.1")) == []
    assert missing_devices(load_device_map("igpu-npu"), machine("CPU", "GPU.0.0", "NPU.3720")) == []


def test_a_broken_driver_of_one_device_leaves_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("clGetPlatformIDs, error code: -1001")

    for module in (core, hardware):
        monkeypatch.setattr(module, "new_core", Broken)
    there = device_inventory()
    assert choose_device_map("cpu", there).device_map.name == "cpu"
    assert (
        "it sees CPU: clGetPlatformIDs, error code: -1001" in missing_devices(load_device_map("lunar-lake"), there)[0]
    )
    assert [one.device for one in hardware_details()][:1] == ["OpenVINO CPU"]


def test_what_an_uninstalled_onnx_runtime_leaves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(
        DeviceError, match=r"ONNX Runtime is damaged.*pip uninstall onnxruntime.*pip install \"mirrorsd"
    ):
        device_inventory()


def test_packages_that_are_there_are_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"onnxruntime-webgpu": "1.25", "onnxruntime-openvino": "1.23", "ONNX Runtime": "1.25"}
    monkeypatch.setattr(devices, "runtime_versions", lambda: there)
    (problem,) = missing_devices(load_device_map("cuda-cpu"), machine("CPU"))
    assert 'pip uninstall onnxruntime-webgpu onnxruntime-openvino; then: pip install "mirrorsd[cuda]"' in problem


def test_an_onnx_runtime_that_does_not_tell_who_computes_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be known of fall-backs: NVIDIA's package for RTX is still so old."""
    monkeypatch.setattr(device, "ort", SimpleNamespace(InferenceSession=object, __version__="1.23.2"))
    with pytest.raises(DeviceError, match=r"does not tell which device computes what; 1\.24 and later do"):
        OnnxDevice(TargetPlacement())
