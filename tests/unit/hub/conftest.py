"""A hub with one ready bundle on its disk, and nothing on this machine's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Faults, serve

from mirrorsd.hub import downloads

NAME = "tiny/pair"


@pytest.fixture
def repository(tmp_path: Path, bundle: Path) -> Path:
    """The bundle as a repository on the server's disk."""
    folder = tmp_path / "hub" / NAME
    folder.parent.mkdir(parents=True)
    shutil.copytree(bundle, folder)
    return folder


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def asked(
    tmp_path: Path, repository: Path, faults: Faults, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """What a running hub has been asked for."""
    monkeypatch.setattr(downloads, "_PAUSE_S", 0.0)
    with serve(tmp_path / "hub", gated=("tiny/gated",), faults=faults) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked
