"""An installation without the package's data files says which is missing, wherever it is wanted."""

from pathlib import Path

import pytest

from mirrorsd.device_maps import builtin_names, load_device_map, loading
from mirrorsd.devices.inventory import DeviceInventory, choose_device_map
from mirrorsd.graphs.errors import ConfigError

INVENTORY = DeviceInventory(
    providers=("CPUExecutionProvider",), openvino_devices=("CPU",), num_cores=2, has_npu_plugin=False
)


def test_without_cards_no_reason_is_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CARDS", tmp_path)
    for ask in (
        builtin_names,
        lambda: load_device_map("cpu"),
        lambda: choose_device_map("auto", INVENTORY),
        lambda: choose_device_map("cpu", INVENTORY),
    ):
        with pytest.raises(ConfigError, match=r"not complete: .*cpu\.toml is missing\. Install it again"):
            ask()


def test_without_the_table_of_pairs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pytest.importorskip("mirrorsd.export.pairs")
    monkeypatch.setattr(pairs, "_TABLE", tmp_path / "pairs.toml")
    pairs.known_pairs.cache_clear()
    with pytest.raises(ConfigError, match=r"pairs\.toml is missing"):
        pairs.known_pairs()
