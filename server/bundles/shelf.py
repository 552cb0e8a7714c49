"""Several bundles by name: those that fit into memory are loaded, the one that waited longest makes room."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread
from traceback import clear_frames

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.graphs.manifest_values import read_manifest
from mirrorsd.hub.archives import ending_of
from mirrorsd.hub.bundles import bundle_folder, is_fetched_by
from mirrorsd.machine.doctor.memory import free_memory, memory_needs
from mirrorsd.runtime import MirrorPipeline, choose_device_map
from mirrorsd.server.bundles.loaded import LoadedBundle
from mirrorsd.server.errors import ApiError, not_now
from mirrorsd.server.settings import ServerSettings

_log = logging.getLogger("mirrorsd.server")
_SPARE = 1.05
"""Of free memory to what a bundle is estimated to need."""
Needs = dict[str, int]


@dataclass(slots=True)
class _Load:
    """A load that is under way, or waits for its turn or for room, and how many wait for its bundle."""

    task: asyncio.Task[None]
    num_wanting: int = 0


class Shelf:
    """The bundles that are served.

    Attributes:
        folders: by name, in the order they were given; the first one answers requests that name none.
        loaded: those that are ready, longest unused first.
        num_waiting: requests that wait for one to be loaded.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        settings: ServerSettings,
        free: Callable[[str], int | None] = free_memory,
    ) -> None:
        self.folders, self.loaded = dict(folders), dict[str, LoadedBundle]()
        self._settings, self._free = settings, free
        self._users = dict.fromkeys(folders, 0)
        self._loads: dict[str, _Load] = {}
        self._one_at_a_time = asyncio.Lock()
        self._left = asyncio.Event()
        self._coming: Future[LoadedBundle] | None = None
        self._closing = asyncio.Event()
        self._wants_room: str | None = None
        self.num_waiting = 0

    @cached_property
    def longest_context(self) -> int:
        """Tokens that the largest of the bundles holds, loaded or not: no request needs more."""
        return max((_context(folder) for folder in self.folders.values()), default=0)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[LoadedBundle]:
        """The bundle of this name, loaded; it stays loaded within.

        Raises:
            ApiError: there is no such bundle, too many wait for one, or too long, or the server is stopping.
            BundleError, ConfigError, DeviceError: it cannot be loaded.
        """
        found = self.known(name)
        if not self._is_ready(found):
            await self._wait_for(found)
        if self._closing.is_set():
            raise not_now("closing")
        bundle = self.loaded.pop(found)
        self.loaded[found] = bundle  # the last of those that were used
        self._users[found] += 1
        try:
            yield bundle
        finally:
            self._users[found] -= 1
            self._left.set()

    def _is_ready(self, name: str) -> bool:
        """Whether a bundle can be used; not while another one waits for its users to go: it might wait for ever."""
        return self._wants_room in (None, name) and name in self.loaded

    async def _wait_for(self, name: str) -> None:
        """Wait as others do that have no seat yet: so many, and so long."""
        if self.num_waiting >= self._settings.seats + self._settings.queue:
            message = f"{self.num_waiting} requests wait for a model to be loaded. Try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self.num_waiting += 1
        waiting = asyncio.timeout(self._settings.limits.request_s)
        try:
            async with waiting:
                while not self._is_ready(name):
                    if self._wants_room in (None, name):
                        await self.load(name)
                    else:  # another one's failure is not its
                        await self._end_of(self._loads[self._wants_room])
        except TimeoutError:
            if not waiting.expired():  # a disk in the network may be late as well
                raise
            raise not_now("loading") from None
        finally:
            self.num_waiting -= 1

    def known(self, name: str | None) -> str:
        """The name of a bundle that is there; the first one's for none.

        Raises:
            ApiError: there is no such bundle.
        """
        found = name or next(iter(self.folders))
        if found not in self.folders:
            there = ", ".join(self.folders)
            raise ApiError(
                404, f"There is no such model here; there are: {there}.", param="model", code="model_not_found"
            )
        return found

    async def load(self, name: str) -> None:
        """Load a bundle if it is not. A client that goes away meanwhile does not stop it: the next one has it.

        Where all go away before that begins, it is given up; who comes just then looks for it once more.

        Raises:
            ApiError: the server is stopping; who waits is told so at once.
            BundleError, ConfigError, DeviceError: it cannot be loaded.
        """
        if self._closing.is_set():
            raise not_now("closing")
        if name not in self._loads:
            self._loads[name] = _Load(asyncio.create_task(self._load_in_turn(name)))
            self._loads[name].task.add_done_callback(lambda _: self._loads.pop(name))
        load = self._loads[name]
        load.num_wanting += 1
        try:
            await self._end_of(load)
        finally:
            load.num_wanting -= 1
            self._left.set()
        load.task.result()

    async def _end_of(self, load: _Load) -> None:
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((load.task, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if not load.task.done():
            raise not_now("closing")

    @property
    def is_loading(self) -> bool:
        """Whether a bundle is being loaded."""
        return bool(self._loads)

    async def _load_in_turn(self, name: str) -> None:
        async with self._one_at_a_time:
            if name not in self.loaded and self._is_wanted(name):
                try:
                    await self._make_room(name)
                    if self._is_wanted(name):
                        self.loaded[name] = await self._opened(name)
                        vars(self).pop("longest_context", None)  # its folder was away, or is another one now
                finally:
                    self._wants_room = None

    def _is_wanted(self, name: str) -> bool:
        """Whether somebody waits for a bundle that is not being loaded yet, and the server goes on."""
        return self._loads[name].num_wanting > 0 and not self._closing.is_set()

    async def _opened(self, name: str) -> LoadedBundle:
        """Load on a thread of its own: nothing ends a load before its time, and no server that ends waits for it."""
        self._coming = coming = Future[LoadedBundle]()

        def load() -> None:
            try:
                bundle = self._open(name)
            except BaseException as error:
                clear_frames(error.__traceback__)  # whoever keeps the error would keep what was loaded by then
                if coming.set_running_or_notify_cancel():
                    coming.set_exception(error)
                return
            if coming.set_running_or_notify_cancel():
                coming.set_result(bundle)
            else:
                bundle.close()  # nobody waits for it any more

        Thread(target=load, name="mirrorsd-load", daemon=True).start()
        try:
            return await asyncio.wrap_future(coming)
        finally:
            self._coming = None

    async def _make_room(self, name: str) -> None:
        """Unload bundles until this one fits, none is left or nobody wants it; those in use are waited for."""
        needs = await asyncio.to_thread(self.needs, name)
        while self._is_wanted(name) and not self._fits(name, needs) and self.loaded:
            self._left.clear()
            idle = next((other for other in self.loaded if not self._users[other]), None)
            if idle is None:
                self._wants_room = name
                await self._left.wait()
            else:
                _log.info("unloading %s to make room for %s", idle, name)
                await asyncio.to_thread(self.loaded.pop(idle).close)

    def needs(self, name: str) -> Needs:
        """Bytes that a bundle is estimated to need, by device, its seats' caches included."""
        manifest = read_bundle(self.folders[name])
        choice = choose_device_map(self._settings.device_map, bundle=manifest)
        found: Needs = {}
        for need in memory_needs(manifest, choice.device_map):
            seats = need.caches * (self._settings.seats)  # the pipeline's own session is one more
            found[need.device] = found.get(need.device, 0) + need.total + seats
        return found

    def _fits(self, name: str, needs: Needs) -> bool:
        is_enough = True
        for device, needed in needs.items():
            free = self._free(device)
            said = "unknown" if free is None else f"{free >> 20} MiB"
            _log.info("%s needs about %d MiB of %s, free is %s", name, needed >> 20, device, said)
            is_enough &= free is None or free > _SPARE * needed
        return is_enough

    def _open(self, name: str) -> LoadedBundle:
        settings = self._settings
        _log.info("loading %s from %s", name, self.folders[name])
        pipe = MirrorPipeline.load(
            self.folders[name],
            device_map=settings.device_map,
            layout=settings.layout,
            speculation=settings.speculation,
        )
        try:
            return LoadedBundle(name, self.folders[name], pipe, settings)
        except BaseException:
            pipe.close()
            raise

    def cancel_all(self) -> None:
        """End every answer within one step."""
        for bundle in self.loaded.values():
            bundle.cancel_all()

    def refuse(self) -> None:
        """Take no more requests."""
        self._closing.set()

    async def close(self) -> None:
        """Unload everything; what is still being loaded has `grace_s`, and is closed behind that when it is there."""
        self.refuse()
        if loads := [load.task for load in self._loads.values()]:
            _, unfinished = await asyncio.wait(loads, timeout=self._settings.grace_s)
            if self._coming is not None and not self._coming.cancel():
                await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)  # it has just come
            for load in unfinished:
                load.cancel()
        for bundle in list(self.loaded.values()):
            await asyncio.to_thread(bundle.close)
        self.loaded.clear()


def _context(folder: Path) -> int:
    """Of a bundle by its manifest; 0 where it cannot be read, which is told when it is loaded."""
    path = folder / names.MANIFEST_FILE
    try:
        return read_manifest(read_text(path), origin=str(path)).target.context
    except (BundleError, DocumentError):
        return 0


def named_folders(given: Sequence[str], on_progress: Callable[[str, float], None] | None = None) -> dict[str, Path]:
    """Bundles by name, from `BUNDLE` or `NAME=BUNDLE`; without one, by that of the folder, or of the archive here.

    Args:
        given: bundle references; what is not on this machine is fetched.
        on_progress: told what is fetched, and the share that is there.

    Raises:
        ConfigError: two of one name, or none at all.
        BundleError: a folder that is no bundle, or a bundle that cannot be fetched.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, mark, reference = _split(text)
        path = bundle_folder(reference, on_progress)
        is_here = not is_fetched_by(reference) and Path(reference).is_file()
        file = Path(reference).name
        called = file.removesuffix(ending_of(file)) if is_here else path.resolve().name
        chosen = name if mark else called.removesuffix(".mirror")
        if not chosen or not chosen.isprintable():
            raise ConfigError(f"{text!r} names no model: give NAME=FOLDER or a folder.")
        if chosen in found:
            raise ConfigError(f"Two bundles are named {chosen!r}: give one of them another name, as NAME=FOLDER.")
        if not (path / names.MANIFEST_FILE).is_file():
            raise BundleError(f"{path} is no bundle: it has no {names.MANIFEST_FILE}. `mirrorsd export` makes one.")
        found[chosen] = path
    if not found:
        raise ConfigError("No bundle was given: name at least one folder.")
    return found


def _split(text: str) -> tuple[str, str, str]:
    """A name, an equals sign and a reference, or two empty texts and a reference; an address may have such signs.

    >>> _split("mine=hf:tiny/pair"), _split("https://host/a.zip?b=c"), _split("a=b/c.mirror")
    (('mine', '=', 'hf:tiny/pair'), ('', '', 'https://host/a.zip?b=c'), ('a', '=', 'b/c.mirror'))
    """
    name, mark, reference = text.partition("=")
    if mark and is_fetched_by(reference):
        return name, mark, reference
    return ("", "", text) if is_fetched_by(text) else text.rpartition("=")
