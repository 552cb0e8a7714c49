"""When a draft's attention is joined into one product; that it says the same is tests/parity's."""

import openvino as ov
import pytest

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.openvino.joined_attention import pays_to_join
from mirrorsd.graphs.contract import DraftShape

SHAPE = DraftShape(
    num_layers=2, vocab_size=320, num_kv_heads=8, head_dim=128, num_streams=3, num_candidates=8, num_noise_rows=16
)


@pytest.mark.parametrize(
    ("capacity", "kind", "pays"),
    [(512, ov.Type.bf16, True), (513, ov.Type.bf16, False), (512, ov.Type.f32, False), (256, ov.Type.f32, True)],
)
def test_short_caches_are_copied(capacity: int, kind: ov.Type, pays: bool) -> None:
    """Two MiB of keys and values a layer: 4 KiB a slot in bf16."""
    assert pays_to_join(SHAPE, DraftPlacement(device="CPU"), capacity, kind) is pays


def test_other_devices_get_the_graph_as_it_was_exported() -> None:
    for placement in (DraftPlacement(device="NPU"), DraftPlacement(device="NPU", emulated=True)):
        assert not pays_to_join(SHAPE, placement, 256, ov.Type.f16)
