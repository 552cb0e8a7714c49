"""`import mirrorsd` is fast, and `mirrorsd --help` loads nothing heavy."""

import subprocess
import sys

TIMED_IMPORT = "import time; start = time.process_time(); import mirrorsd; print(time.process_time() - start)"
"""Seconds of a core: those of the clock on the wall count whatever else the machine does."""
HELP = """
import sys
from mirrorsd.cli.application import run
assert run(["--help"]) == 0
heavy = {"numpy", "torch", "transformers", "onnx", "onnxruntime", "openvino", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
SERVER_PACKAGES = {"starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "h11", "anyio"}
WITHOUT_SERVER = f"""
import sys
import mirrorsd
mirrorsd.MirrorPipeline
import mirrorsd.cli.application
found = {SERVER_PACKAGES!r} & set(sys.modules)
assert not found, found
"""


def run_python(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_import_takes_less_than_300_ms() -> None:
    assert min(float(run_python(TIMED_IMPORT)) for _ in range(3)) < 0.3


def test_help_loads_nothing_heavy() -> None:
    assert "compare" in run_python(HELP)


def test_neither_the_package_nor_the_commands_load_what_the_server_needs() -> None:
    run_python(WITHOUT_SERVER)
