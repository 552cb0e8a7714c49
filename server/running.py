"""A server that runs: uvicorn with bounded connections, an orderly end, and one in a thread for programs and tests."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self

import uvicorn
from starlette.applications import Starlette

from mirrorsd.devices.freed_memory import few_arenas
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server.app import build_app
from mirrorsd.server.settings import ServerSettings
from mirrorsd.server.transport.deadlines import LINGER_S, bounded_by

_AFTER_GRACE_S = 5.0
_START_S = 30.0


class Served(Protocol):
    """What stands behind a server's paths: bundles, or other servers."""

    settings: ServerSettings
    failure: BaseException | None

    @property
    def is_loading(self) -> bool:
        """Whether something is being loaded: that cannot be stopped."""

    @property
    def most_connections(self) -> int:
        """How many clients may be connected at once."""

    async def start(self) -> None:
        """Get ready; the server listens meanwhile."""

    def begin_to_close(self) -> None:
        """Take no more requests; those that run have a while to end."""


class _Server(uvicorn.Server):
    """Tells the service before it waits for what still runs; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Served) -> None:
        super().__init__(config)
        self._service = service
        self.loading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loading = asyncio.create_task(self._service.start())
        self.loading.add_done_callback(self._stop_if_failed)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_to_close()
        if not self.force_exit:
            await asyncio.sleep(LINGER_S)  # whoever is connecting is told so, too
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or self.should_exit
        if self.force_exit and self._service.is_loading:
            signal.signal(sig, signal.SIG_DFL)  # nothing is lost, and a load would be waited for
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    def _stop_if_failed(self, loading: "asyncio.Task[None]") -> None:
        self.should_exit |= not loading.cancelled() and loading.exception() is not None


def configured(app: Starlette, settings: ServerSettings) -> _Server:
    """Uvicorn with this project's deadlines and without logs of its own."""
    limits = settings.limits
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_by(limits, app.state.service.most_connections),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=int(settings.grace_s + _AFTER_GRACE_S),
    )
    return _Server(config, app.state.service)


def bind(settings: ServerSettings) -> socket.socket:
    """The socket to listen on.

    Raises:
        ConfigError: the address is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    if os.name != "nt":  # which would share the address with whoever listens there
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host.strip("[]"), settings.port))
        listening.listen()  # whoever is told of the address may connect at once
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror or error}. Choose another --port, "
            "or an address of this machine."
        ) from error
    return listening


def serve(bundles: Mapping[str, Path], settings: ServerSettings, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it.

    Args:
        bundles: folders by name.
        settings: how.
        say: takes a line when the server listens.

    Raises:
        ConfigError: the address cannot be listened on.
        MirrorError: the first bundle cannot be loaded.
    """
    run(build_app(bundles, settings), settings, lambda url: say(f"listening on {url}; models: {', '.join(bundles)}"))


def run(app: Starlette, settings: ServerSettings, tell: Callable[[str], None]) -> None:
    """Serve an application of this package until a signal ends it; `tell` gets the address when it listens.

    Raises:
        ConfigError: the address cannot be listened on.
        Exception: what it serves cannot be loaded; a `MirrorError` as a rule.
    """
    few_arenas()
    with bind(settings) as listening:
        server = configured(app, settings)
        tell(url_of(listening))
        server.run([listening])
    failure = app.state.service.failure
    if isinstance(failure, Exception):
        raise failure


class Running:
    """A server on a thread of its own, for programs that bring their server along, and for tests.

    Attributes:
        url: where it listens.
        service: what its requests share.
    """

    def __init__(self, bundles: Mapping[str, Path] | Starlette, settings: ServerSettings) -> None:
        self._app = bundles if isinstance(bundles, Starlette) else build_app(bundles, settings)
        self.service = self._app.state.service
        self._socket = bind(settings)
        self.url = url_of(self._socket)
        self.server = configured(self._app, settings)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],), name="server", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop as a signal would, and wait for the end."""
        self.server.should_exit = True
        self._thread.join(_START_S + self.service.settings.grace_s)
        self._socket.close()


def url_of(listening: socket.socket) -> str:
    """The address of a socket as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
