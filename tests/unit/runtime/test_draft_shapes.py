"""What a draft is compiled with: the emulated NPU computes what the card says, not what the CPU would rather."""

import pytest

from mirrorsd.device_maps import DraftPlacement, load_device_map
from mirrorsd.runtime.draft_shapes import device_options, host_options


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
