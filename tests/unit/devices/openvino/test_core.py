"""OpenVINO leaves nobody with a stack for signals that it has freed: handlers run, whoever releases it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
OPENS = re.compile(r"\.Core\(\)|(?<!lambda: )\bov\.compile_model\(")
"""What is handed to `on_a_thread_that_ends` may."""
RELEASED_ELSEWHERE = """
import signal
import threading

import numpy as np
import openvino as ov
from openvino import opset13 as operators

from mirrorsd.devices.openvino.core import new_core

given = operators.parameter([1, 4], np.float32)
compiled = [new_core().compile_model(ov.Model([operators.relu(given)], [given], "relu"), "CPU")]
releases = threading.Thread(target=compiled.clear)
releases.start()
releases.join()
signal.signal(signal.SIGINT, lambda *_: print("handled"))
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the plugin has a stack for signals on Linux only")
def test_a_signal_is_handled_after_another_thread_released_openvino() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASED_ELSEWHERE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_nobody_else_opens_openvino() -> None:
    others = [
        path.relative_to(ROOT).as_posix()
        for folder in ("bench", "cli", "devices", "export", "machine", "runtime", "server", "tests", "training")
        for path in (ROOT / folder).rglob("*.py")
        if OPENS.search(path.read_text(encoding="utf-8")) and path != Path(__file__)
    ]
    assert others == ["devices/openvino/core.py"]
