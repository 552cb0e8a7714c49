"""Who waits for a bundle while another one wants its room."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.runtime import MirrorPipeline
from mirrorsd.server.answers.job import bundle_of
from mirrorsd.server.app import build_app
from mirrorsd.server.bundles import shelf as shelf_module
from mirrorsd.server.bundles.shelf import Shelf
from mirrorsd.server.running import run
from mirrorsd.server.service import Service
from mirrorsd.server.settings import Limits, ServerSettings
from mirrorsd.server.transport.exchange import Exchange


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One bundle is loaded, and there is room for one; the other one cannot be loaded in the end."""

    def fail(_: Shelf, name: str) -> None:
        raise RuntimeError(f"{name} has no memory")

    monkeypatch.setattr(Shelf, "needs", lambda self, name: {})
    monkeypatch.setattr(Shelf, "_fits", lambda self, name, needs: not self.loaded)
    monkeypatch.setattr(Shelf, "_open", fail)
    found: Any = Shelf({"one": Path("one"), "two": Path("two")}, ServerSettings(seats=1, queue=2))
    found.loaded["one"] = SimpleNamespace(close=lambda: None)
    return found


async def use(shelf: Any, name: str) -> object:
    async with shelf.use(name) as bundle:
        return bundle


async def until(is_so: Callable[[], object]) -> None:
    """Let others go on until it is so."""
    for _ in range(100_000):
        if is_so():
            return
        await asyncio.sleep(0)
    pytest.fail("it does not come")


def beside_a_user(shelf: Any, ask: Callable[["asyncio.Task[object]"], Awaitable[None]]) -> None:
    """Ask while somebody uses the one, and another one waits for its room."""

    async def run() -> None:
        async with shelf.use("one"):
            two = asyncio.create_task(use(shelf, "two"))
            await until(lambda: shelf._wants_room)
            await ask(two)

    asyncio.run(run())


def test_another_bundles_failure_is_not_its_own(shelf: Any) -> None:
    async def ask(two: "asyncio.Task[object]") -> None:
        other = asyncio.create_task(use(shelf, "one"))
        await until(lambda: shelf.num_waiting == 2)
        shelf.loaded, loaded = {}, shelf.loaded  # there is room, all at once
        shelf._left.set()
        with pytest.raises(RuntimeError, match="two has no memory"):
            await two
        shelf.loaded = loaded
        assert await other is loaded["one"]

    beside_a_user(shelf, ask)


def test_who_has_left_before_a_load_began_holds_up_nobody(shelf: Any) -> None:
    """Two wait for a bundle's room, and a third for one that is loaded: it is used as soon as both have gone."""

    async def ask(two: "asyncio.Task[object]") -> None:
        again = asyncio.create_task(use(shelf, "two"))
        other = asyncio.create_task(use(shelf, "one"))
        await until(lambda: shelf.num_waiting == 3)
        two.cancel()
        await until(two.done)
        for _ in range(100):
            await asyncio.sleep(0)
        assert shelf._wants_room == "two" and not other.done(), "one of them is still there"
        again.cancel()
        assert await asyncio.wait_for(other, 60) is shelf.loaded["one"]
        assert not shelf.is_loading

    beside_a_user(shelf, ask)


def test_who_comes_as_the_last_one_leaves_is_not_forgotten(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = SimpleNamespace()
    monkeypatch.setattr(Shelf, "_open", lambda self, name: bundle)

    async def run() -> None:
        async with shelf.use("one"):
            two = asyncio.create_task(use(shelf, "two"))
            await until(lambda: shelf._wants_room)
            two.cancel()
            await until(two.done)
            again = asyncio.create_task(use(shelf, "two"))
        assert await asyncio.wait_for(again, 60) is bundle

    asyncio.run(run())


def test_more_than_may_wait_are_refused_and_nobody_waits_for_ever(shelf: Any) -> None:
    async def ask(two: "asyncio.Task[object]") -> None:
        shelf._settings = ServerSettings(seats=1, queue=1, limits=Limits(request_s=0.05))
        found = await asyncio.gather(*(use(shelf, "one") for _ in range(4)), return_exceptions=True)
        assert [getattr(error, "status", error) for error in found] == [503, 429, 429, 429]
        two.cancel()

    beside_a_user(shelf, ask)


@pytest.mark.parametrize("error", [RuntimeError("no seats"), KeyboardInterrupt()])
def test_what_fails_behind_its_pipeline_leaves_none_open(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def fail(*_: object) -> None:
        raise error

    pipe = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(MirrorPipeline, "load", lambda *_, **__: pipe)
    monkeypatch.setattr("mirrorsd.server.bundles.shelf.LoadedBundle", fail)
    with pytest.raises(type(error)):
        Shelf({"one": Path("one")}, ServerSettings())._open("one")
    assert closed == [True]


def test_the_error_of_a_load_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames would hold a pipeline's memory until the garbage collector comes."""
    pipelines: list[weakref.ref[object]] = []

    def load(*_: object, **__: object) -> object:
        class Pipe(SimpleNamespace):
            """A pipeline that was loaded."""

        pipe = Pipe(close=lambda: None)
        pipelines.append(weakref.ref(pipe))
        return pipe

    def fail(name: str, folder: Path, pipe: object, settings: ServerSettings) -> None:
        raise RuntimeError(f"{pipe} has no seats")

    monkeypatch.setattr(MirrorPipeline, "load", load)
    monkeypatch.setattr("mirrorsd.server.bundles.shelf.LoadedBundle", fail)
    monkeypatch.setattr(Shelf, "needs", lambda self, name: {})
    with pytest.raises(RuntimeError, match="has no seats") as kept:
        asyncio.run(Shelf({"one": Path("one")}, ServerSettings()).load("one"))
    assert kept.value.__traceback__ is not None
    assert [pipe() for pipe in pipelines] == [None]


def test_a_server_takes_requests_though_nothing_is_loaded_any_more(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer sends none to one that says that it is loading: it would do so for ever."""
    service = Service(shelf.folders, shelf._settings)
    bundle = SimpleNamespace(close=lambda: None)
    opened = shelf._open
    monkeypatch.setattr(service.shelf, "_open", lambda name: bundle if name == "one" else opened(name))
    assert service.status == "loading"

    async def run() -> None:
        await service.start()
        assert service.status == "ok"
        with pytest.raises(RuntimeError, match="two has no memory"):
            await use(service.shelf, "two")
        assert not service.shelf.loaded and service.status == "ok"
        assert await use(service.shelf, "one") is bundle

    asyncio.run(run())


def test_whatever_keeps_a_bundle_from_being_loaded_ends_the_command(shelf: Any) -> None:
    """What is no error of ours, too: the command would end without a word, and as if nothing had failed."""
    settings = ServerSettings(port=0)
    with pytest.raises(RuntimeError, match="one has no memory"):
        run(build_app(shelf.folders, settings), settings, lambda _: None)


def test_a_bundle_that_was_away_at_first_has_its_whole_context(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = {"one": 512, "two": 0}
    monkeypatch.setattr(shelf_module, "_context", lambda folder: contexts[folder.name])
    monkeypatch.setattr(shelf, "_open", lambda name: SimpleNamespace(close=lambda: None))
    assert shelf.longest_context == 512
    contexts["two"] = 2048
    asyncio.run(use(shelf, "two"))
    assert shelf.longest_context == 2048


def test_a_load_that_fails_by_a_late_disk_is_no_load_that_goes_on(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told that the server is loading asks again and again, and nobody learns what failed."""

    def fail(_: str) -> None:
        raise TimeoutError("the disk is late")

    monkeypatch.setattr(shelf, "_open", fail)
    service = Service(shelf.folders, shelf._settings)
    service.shelf = shelf
    exchange = Exchange({"type": "http", "headers": []}, asyncio.Event().wait, asyncio.Event().wait, Limits())  # type: ignore[arg-type]

    async def ask() -> None:
        async with bundle_of(service, exchange, "two"):
            pytest.fail("it is not there")

    with pytest.raises(TimeoutError, match="the disk is late"):
        asyncio.run(ask())


def test_who_waits_for_a_load_is_counted(shelf: Any) -> None:
    service = Service(shelf.folders, shelf._settings)
    service.shelf = shelf

    def waiting() -> float:
        return next(value for name, _, value in service.metrics.samples() if name == "mirrorsd_requests_waiting")

    shelf.loaded["one"].num_waiting, shelf.loaded["one"].num_running = 2, 1

    async def ask(two: "asyncio.Task[object]") -> None:
        assert waiting() == 3
        two.cancel()
        await until(two.done)
        assert waiting() == 2

    beside_a_user(shelf, ask)
