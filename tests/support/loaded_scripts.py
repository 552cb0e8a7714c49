"""Scripts of the project, imported as they run."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script as it runs: with its own folder first on the path, and `test` not the standard library's."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module
