"""Who may talk to the server, before anything of a request is looked at: Host, Origin, key.

A page of any site can make a browser send requests to this machine. What it cannot do is choose the `Host` and `Origin`
headers, so both are compared with exact lists. Pure ASGI, since wrapping middleware would hide disconnects.
"""

import hmac
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import ServerSettings
from mirrorsd.server.transport.paths import read_path
from mirrorsd.server.transport.refusals import refuse

_OPEN_PATHS = ("/", "/health", "/v1/health")
_OPEN_FOLDER = "/page/"
_SAME_SITE = (b"same-origin", b"none")
Headers = Iterable[tuple[bytes, bytes]]


def guarded(settings: ServerSettings) -> list[Middleware]:
    """What stands around an application: its guard, and around that what lets pages of allowed origins read answers.

    Such pages may send any header: clients have dozens of their own. They may reach into this machine from the
    network, for which a browser asks, too.
    """
    pages = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", "retry-after", "x-mirrorsd-unknown-fields"],
    )
    return [*([pages] if settings.allowed_origins else []), Middleware(Guard, settings=settings)]


class Guard:
    """Lets requests through to `app` if they may come; refuses the others in OpenAI's form."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as ASGI applications do."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise ApiError(404, "There are no web sockets here: streams are server-sent events.")
            scope = self._checked(scope)
        except ApiError as error:
            if scope["type"] == "http":
                await refuse(error, scope, receive, send, self._settings.limits)
            return
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope) -> Scope:
        """The request if it may come, with the path that was looked at: nobody behind the guard reads another one."""
        headers: Headers = scope["headers"]
        self._check_size(scope, headers)
        port = scope["server"][1] or 0
        hosts = self._settings.host_names(port)
        self._check_host(values(headers, b"host"), hosts)
        scope = read_path(scope)
        self._check_origin(scope, headers, hosts)
        self._check_key(scope, headers)
        return scope

    def _check_size(self, scope: Scope, headers: Headers) -> None:
        """What came in one piece was not measured while it came."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        most = self._settings.limits.head_bytes
        if size > most:
            raise ApiError(431, f"The request's head has more than {most} bytes.", code="head_too_large")

    def _check_host(self, found: list[bytes], hosts: frozenset[str]) -> None:
        if len(found) != 1 or found[0].decode("latin-1").lower() not in hosts:
            raise ApiError(
                421,
                "The Host header is not one of this server's names. Address it as 127.0.0.1 or localhost, or start it "
                "with --allowed-host NAME.",
                code="unknown_host",
            )

    def _check_origin(self, scope: Scope, headers: Headers, hosts: frozenset[str]) -> None:
        is_foreign = False
        origins = values(headers, b"origin")
        for origin in (value.decode("latin-1").lower() for value in origins):
            scheme, _, host = origin.partition("://")
            is_own = scheme in ("http", "https") and host in hosts
            is_foreign |= not (is_own or origin in self._origins)
        if not origins and any(site not in _SAME_SITE for site in values(headers, b"sec-fetch-site")):
            is_opened = values(headers, b"sec-fetch-mode") == [b"navigate"] and scope["method"] == "GET"
            is_foreign |= not (is_opened and scope["path"] == "/")
        if is_foreign:
            raise ApiError(
                403,
                "A page of another site asked for this. Start the server with --allowed-origin ORIGIN to let it.",
                code="foreign_origin",
            )

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        keys = self._settings.keys
        is_open = scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_FOLDER)
        if not keys or is_open:
            return
        given = values(headers, b"authorization")
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = [hmac.compare_digest(key.strip(), known.encode()) for known in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "No API key, or not one of this server's. Send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Every value of a header; names are in lower case already."""
    return [value for found, value in headers if found == name]
