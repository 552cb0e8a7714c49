"""What is read out of the NPU compiler's words, with a command that says what it is told to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import psutil
import pytest
from openvino import opset13 as ops
from waiting import wait_until

from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.machine.npu import compiler as npu_compiler
from mirrorsd.machine.npu.compiler import NpuCompiler, platforms_of, tile_options, weight_bytes

_SAYS = """
OpenVINO 2026.4.1-test
\x1b[0m[INFO] 10:00 [vpux] Estimated inference latency: 123.5 us in dpu frequency 1850.0
[INFO] SHAVE operations are unsupported by VPUNN cost model: [builtin_RMS, builtin_TopK]
"""
_TRACE = {
    "traceEvents": [
        {"name": "process_name", "pid": 1, "args": {"name": "DMA"}},
        {"name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "DMA 0 DDR"}},
        {"name": "thread_name", "pid": 2, "tid": 0, "args": {"name": "Shave"}},
        {"name": "thread_name", "pid": 2, "tid": 1, "args": {"name": "DPU"}},
        {"name": "thread_name", "pid": 3, "tid": 0, "args": {"name": "Layers"}},
        {"name": "head?t_MatMul/cluster_0", "ph": "X", "pid": 1, "tid": 0, "dur": 40.0, "ts": 0},
        {"name": "head?t_MatMul/cluster_1", "ph": "X", "pid": 1, "tid": 0, "dur": 30.0, "ts": 0},
        {"name": "scores?t_Softmax", "ph": "X", "pid": 2, "tid": 0, "dur": 7.0, "ts": 0},
        {"name": "head?t_MatMul", "ph": "X", "pid": 2, "tid": 1, "dur": 5.0, "ts": 0},
        {"name": "head", "ph": "X", "pid": 3, "tid": 0, "dur": 99.0, "ts": 0},
    ]
}


def draft(num_rows: int = 8) -> ov.Model:
    rows = ops.parameter([1, 1, num_rows, 64], np.float32, name="rows")
    new = ops.matmul(rows, ops.constant(np.ones((64, 16), np.float32)), False, False)
    new.output(0).tensor.set_names({"new_key.0"})
    return ov.Model([new], [rows])


def command(tmp_path: Path, body: str) -> str:
    script = tmp_path / "compiler.py"
    script.write_text(f"import json, sys\nmodel, blob, platform, *properties = sys.argv[1:]\n{body}", encoding="utf-8")
    return f"{sys.executable} {script}"


def test_a_compiled_shape_has_times_sizes_and_costs(tmp_path: Path) -> None:
    body = f"open(blob, 'wb').write(b'12345')\nprint({_SAYS!r})\n"
    body += f"json.dump({_TRACE!r}, open('compileTimeScheduleTrace.json', 'w'))\n"
    blob = tmp_path / "kept" / "8x8x256.blob"
    report = NpuCompiler(command(tmp_path, body)).compile(draft(), "8x8x256", "4000", blob)
    assert blob.read_bytes() == b"12345"
    assert report.is_compiled
    assert (report.shape, report.platform, report.blob_bytes) == ("8x8x256", "4000", 5)
    assert report.weight_bytes == 64 * 16 * 2
    assert (report.estimated_us, report.frequency_mhz, report.openvino) == (123.5, 1850.0, "2026.4.1-test")
    assert report.not_costed == ("builtin_RMS", "builtin_TopK")
    assert (report.transfers_us, report.matrix_us, report.kernels_us) == (70.0, 5.0, 7.0)
    first = report.costliest[0]
    assert (first.node, first.unit, first.microseconds) == ("head", "transfer", 70.0)


def test_a_refusal_is_in_the_compilers_own_words_once(tmp_path: Path) -> None:
    line = "[ERROR] 11:02:33 [vpux] UnrollPermuteDMA Pass failed"
    report = NpuCompiler(command(tmp_path, f"print({line!r})\nprint({line!r})\nsys.exit(1)")).compile(
        draft(), "8x8x256", "3720", tmp_path / "none.blob"
    )
    assert not report.is_compiled
    assert report.error.endswith("UnrollPermuteDMA Pass failed")
    assert report.error.count("UnrollPermuteDMA") == 1
    assert not (tmp_path / "none.blob").exists()


def test_what_ends_without_a_blob_and_a_word_of_why_is_no_compiler(tmp_path: Path) -> None:
    """The draft is not at fault, so that nothing is kept of it."""
    with pytest.raises(DeviceError, match=r"wrote no blob.*Check --npu-compiler"):
        NpuCompiler(command(tmp_path, "print('nothing to say')")).compile(draft(), "s", "3720", tmp_path / "b")


@pytest.mark.parametrize("words", ["", " "])
def test_a_command_of_no_word_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--npu-compiler is empty"):
        NpuCompiler(words)


def test_the_compiler_is_told_platform_trace_and_tiles(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    body = f"json.dump([platform, *properties], open({str(told)!r}, 'w'))\nopen(blob, 'w').close()"
    NpuCompiler(command(tmp_path, body)).compile(draft(), "s", "5010", tmp_path / "b")
    expected = ["5010", "NPU_TILES=2", "NPU_COMPILATION_MODE_PARAMS=enable-schedule-trace=true"]
    assert json.loads(told.read_text()) == expected


@pytest.mark.parametrize(("num_rows", "expected"), [(24, {"NPU_TILES": "2"}), (32, {})])
def test_few_rows_go_to_two_tiles(num_rows: int, expected: dict[str, str]) -> None:
    assert tile_options(draft(num_rows)) == expected


@pytest.mark.skipif(os.name == "nt", reason="a script that says what runs it")
def test_a_command_is_found_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tools" / "compiler.sh"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nprint('[ERROR] 1 [x] found')", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    found = NpuCompiler("tools/compiler.sh").compile(draft(), "s", "4000", tmp_path / "b")
    assert found.error == "found"


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot be run .*Check --npu-compiler"):
        NpuCompiler(str(tmp_path / "missing")).compile(draft(), "s", "4000", tmp_path / "b")


def test_a_compiler_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "child"
    begins = "import os, subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])"
    notes = f"open({str(mark)!r} + '~', 'w').write(str(child.pid)); os.rename({str(mark)!r} + '~', {str(mark)!r})"

    def never(process: Any, **limits: float) -> Any:
        wait_until(mark.exists)  # it has begun another program by then, however slow the machine is
        raise subprocess.TimeoutExpired("compiler", **limits)

    monkeypatch.setattr(npu_compiler.subprocess.Popen, "communicate", never)
    compiler = NpuCompiler(command(tmp_path, f"{begins}; {notes}; child.wait()"))
    found = compiler.compile(draft(), "s", "4000", tmp_path / "b")
    assert found.error == "the compiler did not end within 300 s", "a shape that is refused, as any other"
    child = int(mark.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_no_compiler_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_compiler, "has_own_compiler", lambda: False)
    with pytest.raises(ConfigError, match=r"has no NPU compiler here.*--npu-compiler"):
        NpuCompiler()


def test_machines_and_numbers_name_platforms() -> None:
    assert platforms_of("Lunar-Lake, 5010,4000,meteor-lake") == ("4000", "5010", "3720")
    with pytest.raises(ConfigError, match=r"'4001'.*known are 3720, 4000, 5010, meteor-lake"):
        platforms_of("4001")


def test_weights_are_counted_as_they_reach_the_device() -> None:
    rows = ops.parameter([1, 512], np.float32)
    integers = ops.convert(ops.constant(np.ones((512, 4), np.int8)), ov.Type.f32)
    floats = ops.constant(np.ones((4, 300), np.float32))
    product = ops.matmul(ops.matmul(rows, integers, False, False), floats, False, False)
    assert weight_bytes(ov.Model([product], [rows])) == 512 * 4 + 2 * 4 * 300
