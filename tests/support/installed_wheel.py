"""The wheel in an environment of its own, with what generating and serving need and nothing that only exports need."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from loaded_scripts import load_script

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
    """Build the source distribution of a fresh clone, and the wheel of that, as `python -m build` does; install it."""
    source, environment = folder / "source", folder / "environment"
    if (ROOT / ".git").exists():
        clone_into(source)
    else:
        ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "samples")
        shutil.copytree(ROOT, source, ignore=ignore)
    run_quietly([sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(source)])
    run_quietly([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    made = find(folder)
    wanted = [f"{made.wheel}[cpu,server]", *(["pyinstaller"] if FREEZES in os.environ else [])]
    install(made.programs / "python", ["-c", str(ROOT / "constraints.txt"), *wanted])


def install(python: Path, wanted: list[str]) -> None:
    """Install into an environment without pip, with ours or with uv: to make one takes longer than what is wanted."""
    uv = Path(sys.executable).with_name("uv.exe" if os.name == "nt" else "uv")
    if uv.is_file():
        with pytest.MonkeyPatch.context() as patch:
            variables = load_script("environment", patch).uv_variables(Path(sys.executable))
        run_quietly([str(uv), "pip", "install", "--python", str(python), *wanted], variables)
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        run_quietly([*pip, *wanted])


def clone_into(folder: Path) -> None:
    """Copy what is tracked, as it is now, and commit it."""
    for name in tracked():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def tracked() -> set[str]:
    """Every file of the clone, without what is kept out of distributions: weights, and git's own files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and not name.endswith(".safetensors")}


def run_quietly(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a command that must not fail."""
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    assert finished.returncode == 0, finished.stdout + finished.stderr
