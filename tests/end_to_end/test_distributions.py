"""The wheel and the source distribution hold everything: what is built of either is the same package."""

import tarfile
import zipfile
from pathlib import Path

import pytest
from installed_wheel import ROOT, InstalledWheel, tracked

PACKAGED = ("server/page/index.html", "device_maps/cpu.toml", "export/pairs.toml", "export/verify/calibration.txt")
LEFT_OUT = ("tests", "samples", "docs", "scripts", "bench", ".ci")
"""Folders of the clone that no wheel has."""
MOST_BYTES = 20_000_000


@pytest.fixture
def built(installed_wheel: InstalledWheel) -> tuple[Path, Path]:
    """A source distribution of a fresh clone, and the wheel that is made of it: what `python -m build` makes."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone")
    return installed_wheel.sources, installed_wheel.wheel


@pytest.mark.slow
def test_the_source_distribution_holds_the_clone(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers()}
    missing = {name for name in tracked() if (ROOT / name).is_file()} - inside
    assert not {name for name in missing if not name.startswith((".github/", ".git"))}
    assert "commit.txt" in inside
    assert built[0].stat().st_size < MOST_BYTES


@pytest.mark.slow
def test_the_wheel_made_of_it_holds_the_package_and_its_commit(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        inside = set(archive.namelist())
        commit = archive.read("mirrorsd/commit.txt").decode().strip()
    assert len(commit) == 12
    wanted = {
        name
        for name in tracked()
        if name.endswith(".py") and "/" in name and not name.startswith((*LEFT_OUT, "cli/opt"))
    }
    assert {f"mirrorsd/{name}" for name in (*wanted, *PACKAGED)} <= inside
    assert not [name for name in inside if name.split("/")[1:2] and name.split("/")[1] in LEFT_OUT[:4]]
