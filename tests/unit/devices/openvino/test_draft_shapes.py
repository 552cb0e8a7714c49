"""What a draft is compiled with: the emulated NPU computes what the card says, not what the CPU would rather."""

from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from mirrorsd.device_maps import DraftPlacement, load_device_map
from mirrorsd.devices.draft_passes import pass_buckets
from mirrorsd.devices.openvino.draft_shapes import cache_type, device_options, host_options, said_of
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry, SourceModel


@pytest.mark.parametrize(("precision", "interconnect", "computed"), [("f32", "NO", "f32"), ("f16", "YES", "f32")])
def test_an_emulated_npu_keeps_the_card_s_precision(precision: str, interconnect: str, computed: str) -> None:
    placement = DraftPlacement(device="NPU", emulated=True, precision=precision, threads=2)
    device, options = device_options(placement)
    assert (device, options["NPUW_DEVICES"], options["NPUW_F16IC"]) == ("NPU", "CPU", interconnect)
    host = host_options(placement)
    assert (host["INFERENCE_PRECISION_HINT"], host["INFERENCE_NUM_THREADS"]) == (computed, 2)
    assert host["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0


def test_real_devices_need_no_host_options() -> None:
    assert host_options(load_device_map("cpu").draft) == {}
    assert host_options(load_device_map("cuda-npu").draft) == {}
    assert device_options(load_device_map("cuda-npu").draft)[1]["INFERENCE_PRECISION_HINT"] == "f16"


class _Core:
    """A processor with or without bf16, as OpenVINO describes it."""

    def __init__(self, *, has_bf16: bool) -> None:
        self._found: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": ov.Type.bf16 if has_bf16 else ov.Type.f32,
            "OPTIMIZATION_CAPABILITIES": ["FP32", "BF16"] if has_bf16 else ["FP32"],
        }

    def get_property(self, device: str, name: str) -> Any:
        assert device == "CPU"
        return self._found[name]


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_the_cache_is_in_bf16_only_where_the_processor_computes_in_it(precision: str) -> None:
    on_cpu = DraftPlacement(device="CPU", precision=precision)
    assert _kind(on_cpu, has_bf16=True) == ov.Type.bf16
    assert _kind(on_cpu, has_bf16=False) == ov.Type.f32


def test_the_cache_is_what_the_graph_says_elsewhere() -> None:
    assert _kind(DraftPlacement(device="CPU", precision="f32"), has_bf16=True) == ov.Type.f32
    assert _kind(DraftPlacement(device="NPU", precision="f32", emulated=True), has_bf16=True) == ov.Type.f32


def test_an_npu_keeps_its_cache_in_16_bits() -> None:
    assert _kind(DraftPlacement(device="NPU", precision="auto"), has_bf16=True) == ov.Type.f16
    assert _kind(DraftPlacement(device="NPU", precision="f16"), has_bf16=False) == ov.Type.f16
    assert _kind(DraftPlacement(device="NPU", emulated=True, precision="bf16"), has_bf16=True) == ov.Type.f32


_BUCKETS = ((4, 1), (4, 4), (8, 1), (8, 8), (128, 1))


def test_short_passes_on_a_processor_all_have_one_shape() -> None:
    assert _pass_buckets(DraftPlacement(device="CPU")) == [(4, 4), (8, 8), (128, 1)]


def test_other_devices_and_a_model_for_all_shapes_take_the_smallest_that_fits() -> None:
    assert _pass_buckets(DraftPlacement(device="NPU")) == list(_BUCKETS)
    shared = _pass_buckets(DraftPlacement(device="CPU"), is_shared=True)
    assert shared == sorted({(1, 1), (2, 2), *_BUCKETS, *shared})
    for num_rows in range(1, _BUCKETS[-1][0] + 1):
        taken = next(rows for rows, _ in shared if rows >= num_rows)
        assert taken < 2 * max(num_rows, _BUCKETS[0][0]), "not half of what is computed is padding"


def _pass_buckets(placement: DraftPlacement, *, is_shared: bool = False) -> list[tuple[int, int]]:
    buckets = [DraftBucket(rows=rows, tips=tips) for rows, tips in reversed(_BUCKETS)]
    return [(bucket.rows, bucket.tips) for bucket in pass_buckets(_entry(buckets), placement, is_shared=is_shared)]


def _kind(placement: DraftPlacement, *, has_bf16: bool) -> ov.Type:
    return cache_type(_Core(has_bf16=has_bf16), _entry([]), placement)  # type: ignore[arg-type]


def _entry(buckets: list[DraftBucket]) -> DraftEntry:
    shape = DraftShape(num_layers=1, vocab_size=8, num_kv_heads=1, head_dim=8, num_streams=0, num_candidates=1)
    return DraftEntry(
        source=SourceModel(name="d", family="llama", licence="unknown", num_parameters=1),
        shape=shape,
        precision="fp32",
        num_stream_layers=0,
        file="draft/draft.xml",
        buckets=tuple(buckets),
        capacities=(64,),
    )


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Exception from core.cpp:84:\nstd::bad_alloc\n", "core.cpp:84: std::bad_alloc. There is too little memory"),
        ("mapping for 6, err=Cannot allocate memory", "memory. There is too little memory: close other programs"),
        ("Resource temporarily unavailable", "unavailable. There is too little memory"),
        ("Unable to read the model.", "Unable to read the model. Copy it again."),
    ],
)
def test_what_openvino_says_comes_in_a_line_with_what_helps(tmp_path: Path, said: str, advice: str) -> None:
    """A machine without memory has no damaged bundle."""
    path = tmp_path / "draft.xml"
    assert "draft.xml is not there: leave a bundle where it is" in said_of(path, RuntimeError(said), "")
    path.touch()
    assert advice in said_of(path, RuntimeError(said), "Copy it again.")
    assert "\n" not in said_of(path, RuntimeError(said), "")
