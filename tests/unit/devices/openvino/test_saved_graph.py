"""A graph that cannot be written to its end."""

import errno
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from mirrorsd.devices.openvino.saved_graph import save_graph


def graph() -> ov.Model:
    given = opset13.parameter([1, 64], np.float32)  # type: ignore[no-untyped-call]
    numbers = opset13.constant(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    return ov.Model([opset13.matmul(given, numbers, False, False)], [given], "product")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no bound on the size of a file")
@pytest.mark.parametrize("in_fp16", [False, True])
def test_a_disk_that_takes_no_more_is_the_system_s_error(tmp_path: Path, *, in_fp16: bool) -> None:
    """OpenVINO says `basic_ios::clear: iostream error` and nothing else."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(OSError, match="OpenVINO cannot write it to its end") as caught:
            save_graph(graph(), tmp_path / "a.xml", in_fp16=in_fp16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a.xml"))
    save_graph(graph(), tmp_path / "a.xml", in_fp16=in_fp16)
    assert (tmp_path / "a.bin").stat().st_size == 64 * 256 * (2 if in_fp16 else 4)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        save_graph(graph(), tmp_path / "no" / "folder" / "a.onnx", in_fp16=False)
