"""Intel's own compiler on drafts as the exporter makes them: what it takes, how long it expects a round to take.

Needs the compiler, no NPU: `scripts/npu_compiler/setup.sh` (Linux) or OpenVINO on Windows.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import static_shapes
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.machine.npu.ahead import device_graph
from mirrorsd.machine.npu.compiler import NpuCompiler, has_own_compiler

SCRIPTS = Path(__file__).parents[2] / "scripts" / "npu_compiler"
FOLDER = Path(os.environ.get("MIRRORSD_NPU_COMPILER", Path.home() / ".cache" / "mirrorsd" / "npu-compiler"))
IS_SET_UP = (FOLDER / "bin" / "compile_ir.exe").is_file() and shutil.which("wine") is not None
SMALL, LARGE = (8, 8, 256), (64, 1, 512)
COMPILED = (("3720", SMALL), ("4000", SMALL), ("4000", LARGE), ("5010", LARGE))
"""Every platform, every shape, and one platform with both: what a shape needs, all platforms have."""

pytestmark = [
    pytest.mark.npu_compiler,
    pytest.mark.long,
    pytest.mark.skipif(
        not (IS_SET_UP or has_own_compiler()), reason="no NPU compiler here: run scripts/npu_compiler/setup.sh"
    ),
]


@pytest.fixture
def compiler() -> NpuCompiler:
    return NpuCompiler() if has_own_compiler() else NpuCompiler(str(SCRIPTS / "compile.sh"))


@pytest.mark.parametrize(("platform", "shape"), COMPILED)
def test_the_draft_compiles(
    tiny_bundle: Path, compiler: NpuCompiler, platform: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    graph = device_graph(tiny_bundle, read_bundle(tiny_bundle).draft, shape)
    report = compiler.compile(graph, "x".join(map(str, shape)), platform, tmp_path / "draft.blob")
    assert report.error == ""
    assert (tmp_path / "draft.blob").stat().st_size == report.blob_bytes > 0
    assert report.estimated_us is not None
    assert 10 < report.estimated_us < 5000
    assert report.transfers_us > 0
    assert report.costliest
    assert report.openvino == ov.get_version()


def test_3720_refuses_what_the_report_on_conformance_says_it_refuses(
    tiny_bundle: Path, compiler: NpuCompiler, tmp_path: Path
) -> None:
    entry = read_bundle(tiny_bundle).draft
    whole = new_core().read_model(tiny_bundle / entry.file)
    whole.reshape(static_shapes(entry, 8, 8, 256))
    report = compiler.compile(whole, "8x8x256", "3720", tmp_path / "draft.blob")
    assert not report.is_compiled
    assert "UnrollPermuteDMA" in report.error


def test_integer_weights_stay_integers_in_the_blob(tiny_bundle: Path, compiler: NpuCompiler, tmp_path: Path) -> None:
    from openvino import opset13 as ops

    rows = ops.parameter([1, 8, 1024], np.float16, name="rows")
    integers = ops.constant(np.random.default_rng(0).integers(-127, 127, (2048, 1024), dtype=np.int8))
    scales = ops.constant(np.full((2048, 1), 0.01, np.float16))
    weight = ops.multiply(ops.convert(integers, ov.Type.f16), scales)
    model = ov.Model([ops.matmul(rows, weight, False, True)], [rows])
    report = compiler.compile(model, "product", "4000", tmp_path / "product.blob")
    assert report.blob_bytes / report.weight_bytes < 1.3
