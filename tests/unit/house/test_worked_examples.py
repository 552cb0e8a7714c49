"""The examples in the docstrings are tests, in every module that has some."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (
    "graphs",
    "device_maps",
    "families",
    "export",
    "texts",
    "devices",
    "runtime",
    "machine",
    "server",
    "training",
    "cli",
    "bench",
)


def modules_with_examples() -> list[str]:
    return [
        ".".join(["mirrorsd", *path.relative_to(ROOT).with_suffix("").parts])
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ">>>" in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0
    assert found.attempted > 0
