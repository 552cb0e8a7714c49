"""What all requests share: settings, bundles, metrics, and whether the server is still there for them."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from mirrorsd.server.bundles.shelf import Shelf
from mirrorsd.server.metrics import Metrics
from mirrorsd.server.settings import ServerSettings

_log = logging.getLogger("mirrorsd.server")


class Service:
    """One server.

    Attributes:
        settings: what it was told.
        shelf: its bundles.
        metrics: what it counts.
        failure: why the first bundle could not be loaded.
        is_closing: whether it takes no more requests.
        is_over: whether those that ran then have had their time.
    """

    def __init__(self, folders: Mapping[str, Path], settings: ServerSettings) -> None:
        self.settings = settings
        self.shelf = Shelf(folders, settings)
        self.metrics = Metrics(self._num_running, self._num_waiting)
        self.failure: BaseException | None = None
        self.is_closing = self.is_over = False
        self._is_ready = False

    @property
    def status(self) -> str:
        """`ok`, or why no requests are taken: `loading` the first bundle, `failed`, `closing`.

        Once it was loaded, a server without any loads one for the next request: who keeps requests from it waits in
        vain.
        """
        if self.is_closing:
            return "closing"
        if self.failure is not None:
            return "failed"
        return "ok" if self._is_ready else "loading"

    async def start(self) -> None:
        """Load the first bundle; the server listens meanwhile."""
        first = next(iter(self.shelf.folders))
        try:
            await self.shelf.load(first)
            self._is_ready = True
        except BaseException as error:
            if not self.is_closing:
                self.failure = error
            raise

    @property
    def is_loading(self) -> bool:
        """Whether a bundle is being loaded."""
        return self.shelf.is_loading

    @property
    def most_connections(self) -> int:
        """One for each request that may run or wait, of any bundle, and some for others."""
        places = len(self.shelf.folders) * (self.settings.seats + self.settings.queue)
        return self.settings.limits.connections + places

    def begin_to_close(self) -> None:
        """Take no more requests; those that run have `grace_s`, then they end within one step."""
        self.is_closing = True
        self.shelf.refuse()
        asyncio.get_running_loop().call_later(self.settings.grace_s, self._end)

    def _end(self) -> None:
        self.is_over = True
        self.shelf.cancel_all()

    async def close(self) -> None:
        """Release all devices."""
        self.is_closing = True
        await self.shelf.close()

    def _num_running(self) -> float:
        return float(sum(bundle.num_running for bundle in self.shelf.loaded.values()))

    def _num_waiting(self) -> float:
        return float(self.shelf.num_waiting + sum(bundle.num_waiting for bundle in self.shelf.loaded.values()))
