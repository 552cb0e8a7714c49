"""Who waits for a bundle while another one wants its room."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.server.bundles.shelf import Shelf
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits, ServerSettings


@pytest.fixture
def shelf() -> Any:
    """One bundle is loaded and in use; the other one waits for its room, and cannot be loaded in the end."""
    found: Any = Shelf({"one": Path("one"), "two": Path("two")}, ServerSettings(seats=1, queue=1))
    found.loaded["one"], found._wants_room = SimpleNamespace(), "two"

    async def fail(name: str) -> None:
        await asyncio.sleep(0.01)
        found._wants_room = None
        raise RuntimeError(f"{name} has no memory")

    found.load = fail
    return found


def test_another_bundles_failure_is_not_its_own(shelf: Any) -> None:
    async def use(name: str) -> object:
        async with shelf.use(name) as bundle:
            return bundle

    assert asyncio.run(use("one")) is shelf.loaded["one"]
    shelf._wants_room = "two"
    with pytest.raises(RuntimeError, match="two has no memory"):
        asyncio.run(use("two"))


def test_more_than_may_wait_are_refused_and_nobody_waits_for_ever(shelf: Any) -> None:
    async def never(_: str) -> None:
        await asyncio.sleep(60)

    async def use() -> None:
        async with shelf.use("one"):
            pytest.fail("it is still wanted by another")

    async def ask() -> list[Any]:
        return await asyncio.gather(*(use() for _ in range(4)), return_exceptions=True)

    shelf.load = never
    shelf._settings = ServerSettings(seats=1, queue=1, limits=Limits(request_s=0.05))
    found = asyncio.run(ask())
    assert all(isinstance(error, ApiError) for error in found)
    assert sorted(error.status for error in found) == [429, 429, 503, 503]
