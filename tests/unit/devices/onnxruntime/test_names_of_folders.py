"""A folder whose name is no text is refused in words, before a runtime is asked."""

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
