"""What several processes of one test run need is made by the first that asks; the others wait, and read it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

_DONE = ".made"


def folder_of_the_run(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share, and no other run."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run, as `make` has filled it; nobody may change it afterwards."""
    folder = folder_of_the_run(factory) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / _DONE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a test that failed here
            folder.mkdir()
            make(folder)
            (folder / _DONE).touch()
    return folder
