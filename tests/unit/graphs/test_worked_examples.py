"""The examples in the docstrings are tests."""

import doctest
from types import ModuleType

import pytest

from mirrorsd.graphs import bundle_files, contract, manifest, names


@pytest.mark.parametrize("module", [bundle_files, contract, manifest, names], ids=lambda module: module.__name__)
def test_docstring_examples(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
