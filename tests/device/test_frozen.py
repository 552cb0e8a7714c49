"""A program that PyInstaller has frozen from the wheel runs at the first try, and says the same (`check_frozen.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.tests.end_to_end.test_clean_environment import ROOT, build_wheel, run_quietly

pytestmark = pytest.mark.skipif(
    not os.environ.get("MIRRORSD_FREEZES"), reason="freezing takes minutes: python3 scripts/check_frozen.py"
)
PROGRAM = """
import json, sys
from time import perf_counter
started = perf_counter()
from mirrorsd import MirrorPipeline
imported = perf_counter()
with MirrorPipeline.load(sys.argv[1], device_map="auto") as pipe:
    loaded = perf_counter()
    result = pipe.generate("Once upon a time", max_new_tokens=16, method="mirror")
first = result.stats.time_to_first_token_ms / 1e3
times = {"import": imported - started, "load": loaded - imported, "first_token": first}
print(json.dumps({"ids": list(result.token_ids), "map": pipe.device_map.name, "seconds": times}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, ONNX Runtime and PyInstaller, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("frozen")
    wheel = build_wheel(folder)
    run_quietly([sys.executable, "-m", "venv", str(folder / "environment")])
    scripts = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
    pins = ["-c", str(ROOT / "constraints.txt")]
    run_quietly([str(scripts / "python"), "-m", "pip", "install", "--quiet", *pins, f"{wheel}[cpu]", "pyinstaller"])
    return scripts


def said(command: list[str]) -> dict[str, object]:
    alone = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "")}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_a_frozen_program_runs_at_the_first_try(environment: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    run_quietly(
        [
            *(str(environment / "pyinstaller"), "--noconfirm", "--log-level", "ERROR", str(program)),
            *("--distpath", str(tmp_path / "dist"), "--workpath", str(tmp_path / "work"), "--specpath", str(tmp_path)),
        ]
    )
    folder = tmp_path / "dist" / "program"
    plain = said([str(environment / "python"), str(program), str(tiny_bundle)])
    frozen = said([str(folder / ("program.exe" if os.name == "nt" else "program")), str(tiny_bundle)])
    assert frozen["ids"] == plain["ids"] and frozen["map"] == plain["map"]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"\nfrozen: {size / 1e6:.0f} MB, {frozen['seconds']}; from the wheel: {plain['seconds']}")
