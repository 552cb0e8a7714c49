"""Nothing is reported to anybody: not that OpenVINO was imported, and not that a model was converted."""

import os
import subprocess
import sys
from pathlib import Path

LISTENS = """
import socket, sys
from multiprocessing import Process

reports = []
Process.start = socket.socket.connect = lambda *given: reports.append(given)
import mirrorsd
import onnx
import openvino as ov
from openvino.tools import ovc

rows = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2]) for name in ("rows", "out")]
graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["rows"], ["out"])], "one", rows[:1], rows[1:])
onnx.save(onnx.helper.make_model(graph), sys.argv[1])
ov.convert_model(sys.argv[1])
assert not reports, reports
assert type(ovc.telemetry).__module__ == "openvino.tools.ovc.telemetry_stub", type(ovc.telemetry)
"""


def test_neither_an_import_nor_a_conversion_is_reported(tmp_path: Path) -> None:
    """A home of its own has no note that somebody once said no; `CI` would silence them, too."""
    home = {name: str(tmp_path) for name in ("HOME", "USERPROFILE", "LOCALAPPDATA")}
    program = [sys.executable, "-c", LISTENS, str(tmp_path / "model.onnx")]
    variables = {name: value for name, value in os.environ.items() if name != "CI"} | home
    finished = subprocess.run(program, capture_output=True, text=True, check=False, env=variables)
    assert finished.returncode == 0, finished.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}
