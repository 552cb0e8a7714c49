"""What is kept about a bundle on this machine holds nothing but speed: it keeps no bundle from loading."""

import logging
from pathlib import Path

import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.runtime.tuned import Tuned


@pytest.mark.usefixtures("own_cache")
def test_a_cache_that_cannot_be_read_is_said_and_left(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's folder, as `sudo` or a container leaves it; Python 3.11 raises what 3.14 takes for absent."""

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    card = load_device_map("cpu")
    monkeypatch.setattr(Path, "is_file", refused)
    with caplog.at_level(logging.WARNING):
        assert Tuned.read(bundle, card) is None
    assert "tuned-cpu.json is damaged (PermissionError" in caplog.text
