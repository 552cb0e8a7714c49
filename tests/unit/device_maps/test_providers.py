"""The guide "adding a provider", done on a toy: one entry, and cards, places and advice know it."""

import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.device_maps.providers import PROVIDERS, Provider
from mirrorsd.devices import inventory
from mirrorsd.devices.onnxruntime.device import OnnxDevice, place_of
from mirrorsd.graphs.errors import ConfigError


@pytest.fixture
def abacus(monkeypatch: pytest.MonkeyPatch) -> TargetPlacement:
    entry = Provider(package="beads", memory="dml", unreachable="frame {device_id}; it has no beads")
    monkeypatch.setitem(PROVIDERS, "AbacusExecutionProvider", entry)
    return TargetPlacement(provider="AbacusExecutionProvider", device_id=2)


def test_an_entry_is_all_that_a_provider_takes(abacus: TargetPlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(abacus)
    assert (place.kind, place.device_id, place.is_device, place.graphs) == ("dml", 2, True, None)
    assert OnnxDevice(TargetPlacement()).place.kind == "cpu"
    there = inventory.DeviceInventory(
        providers=("CPUExecutionProvider",), openvino_devices=(), num_cores=2, has_npu_plugin=False
    )
    (missing,) = inventory._missing_provider(abacus, there)
    assert "AbacusExecutionProvider" in missing and "pip install beads)" in missing
    monkeypatch.setattr(inventory, "_has_room", lambda target: False)
    there = inventory.DeviceInventory(
        providers=("AbacusExecutionProvider",), openvino_devices=(), num_cores=2, has_npu_plugin=False
    )
    assert inventory._missing_provider(abacus, there) == ["the target needs frame 2; it has no beads"]


def test_a_provider_without_an_entry_is_refused_and_those_that_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"AbacusExecutionProvider.*CPUExecutionProvider"):
        TargetPlacement(provider="AbacusExecutionProvider")
