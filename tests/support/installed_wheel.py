"""The wheel in an environment of its own, with what generating and serving need and nothing that only exports need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FREEZES = "MIRRORSD_FREEZES"
"""The variable that asks for programs to be frozen."""


class InstalledWheel(NamedTuple):
    """The distributions, and the folder of the environment's programs."""

    wheel: Path
    sources: Path
    programs: Path


def find(folder: Path) -> InstalledWheel:
    """What `make` has left in a folder."""
    (wheel,), (sources,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return InstalledWheel(wheel, sources, folder / "environment" / ("Scripts" if os.name == "nt" else "bin"))


def make(folder: Path) -> None:
    """Build of the source distribution of a copy, so that neither an old `build` folder nor stray files get in."""
    source, environment = folder / "source", folder / "environment"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "samples")
    shutil.copytree(ROOT, source, ignore=ignore)
    run_quietly([sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(source)])
    run_quietly([sys.executable, "-m", "venv", str(environment)])
    made = find(folder)
    pip = [str(made.programs / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    wanted = [f"{made.wheel}[cpu,server]", *(["pyinstaller"] if FREEZES in os.environ else [])]
    run_quietly([*pip, "-c", str(ROOT / "constraints.txt"), *wanted])


def run_quietly(command: list[str]) -> None:
    """Run a command that must not fail."""
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
