"""Nothing is reported to anybody: not that a runtime was imported, and not what it converted or ran."""

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
opset = [onnx.helper.make_opsetid("", 20)]
onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), sys.argv[1])
ov.convert_model(sys.argv[1])
assert not reports, reports
import onnxruntime

onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
assert type(ovc.telemetry).__module__ == "openvino.tools.ovc.telemetry_stub", type(ovc.telemetry)
"""


def test_neither_imports_nor_conversions_nor_sessions_are_reported(tmp_path: Path) -> None:
    """A home of its own has no note that somebody once said no; `CI` would silence them, too.

    ONNX Runtime connects from threads that no Python sees: it leaves a device's number and a queue at home.
    """
    home = {name: str(tmp_path) for name in ("HOME", "USERPROFILE", "LOCALAPPDATA")}
    program = [sys.executable, "-c", LISTENS, str(tmp_path / "model.onnx")]
    quiet = {"CI", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    variables = {name: value for name, value in os.environ.items() if name not in quiet} | home
    finished = subprocess.run(program, capture_output=True, text=True, check=False, env=variables)
    assert finished.returncode == 0, finished.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}
