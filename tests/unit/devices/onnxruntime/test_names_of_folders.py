"""A folder whose name a runtime would not find is refused in words, before it is asked."""

import os
import sys
from pathlib import Path

import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.graphs.errors import BundleError


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes there")
def test_a_name_that_is_no_text_is_told(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.mirror"))
    device = OnnxDevice(TargetPlacement(provider="CPUExecutionProvider", threads=1))
    with pytest.raises(BundleError, match=r"caf\\udce9\.mirror is no name in UTF-8.*rename that folder"):
        device.open(folder / "prefix.onnx", "float32")


def test_a_name_that_python_reads_in_another_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a locale of ISO-8859-1: the folder's name is UTF-8, and not damaged."""
    device = OnnxDevice(TargetPlacement(provider="CPUExecutionProvider", threads=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsencode", lambda path: str(path).encode("latin-1"))
        with pytest.raises(BundleError, match=r"takes .*caf\\xc3\\xa9\.mirror for .* UTF-8, which it is.*PYTHONUTF8=1"):
            device.open(tmp_path / "caf\xc3\xa9.mirror" / "prefix.onnx", "float32")
