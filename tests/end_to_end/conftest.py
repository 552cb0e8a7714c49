"""Stages that are the same are traced once; files of few and long tests come before those of short ones."""

import pytest
from traced_once import traced_anew, traced_once

__all__ = ["traced_anew", "traced_once"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Requests to a server are short: they fill what is left of the time at the end, in all processes.

    Those to fronts wait for commands that start, and are the longest file: they come before.
    """
    items.sort(key=lambda item: "server" in item.path.parts and "front" not in item.path.name)
