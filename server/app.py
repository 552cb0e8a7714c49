"""The application: which path is answered by whom, and what surrounds every request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from mirrorsd.devices import freed_memory
from mirrorsd.graphs.errors import ConfigError, GenerationError, MirrorError
from mirrorsd.graphs.shipped_files import shipped
from mirrorsd.server import inspection
from mirrorsd.server.answers.chat import chat
from mirrorsd.server.answers.completions import completions
from mirrorsd.server.answers.responses import responses
from mirrorsd.server.errors import ApiError, api_error, internal_error, not_now
from mirrorsd.server.openapi import openapi_document
from mirrorsd.server.service import Service
from mirrorsd.server.settings import ServerSettings
from mirrorsd.server.transport.exchange import ClientDisconnect, Exchange, while_connected
from mirrorsd.server.transport.guard import guarded
from mirrorsd.server.transport.kept import KeptAnswers, kept_answers
from mirrorsd.server.transport.page_files import PageFiles
from mirrorsd.server.transport.refusals import refuse
from mirrorsd.server.wire.chat import ChatRequest
from mirrorsd.server.wire.completions import CompletionRequest, DetokenizeRequest, TemplateRequest, TokenizeRequest
from mirrorsd.server.wire.known_fields import refused_field, unknown_fields
from mirrorsd.server.wire.responses import ResponseRequest

_log = logging.getLogger("mirrorsd.server")
Handler = Callable[..., Awaitable[None]]
CLIENT_GONE = 499
LONG_BODY = 1 << 16
"""Bytes of a body behind which memory is given back at once."""


class Endpoint(NamedTuple):
    """A path, its method, who answers it, the model of its body, and a line about it."""

    path: str
    method: str
    handler: Handler
    body: type[BaseModel] | None
    summary: str
    needs_model: bool = False


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "POST", chat, ChatRequest, "Answer a conversation.", needs_model=True),
    Endpoint("/v1/completions", "POST", completions, CompletionRequest, "Go on with a text.", needs_model=True),
    Endpoint(
        "/v1/responses", "POST", responses, ResponseRequest, "Answer a conversation (newer form).", needs_model=True
    ),
    Endpoint("/v1/answers/{key}", "GET", inspection.resume, None, "A kept answer, from its start."),
    Endpoint("/v1/answers/{key}", "DELETE", inspection.cancel, None, "End a kept answer."),
    Endpoint("/v1/models", "GET", inspection.models, None, "The models that can be asked for."),
    Endpoint("/v1/models/{model}", "GET", inspection.model, None, "One of them."),
    Endpoint("/health", "GET", inspection.health, None, "Whether requests are taken."),
    Endpoint("/metrics", "GET", inspection.metrics, None, "Prometheus metrics."),
    Endpoint("/props", "GET", inspection.props, None, "Properties of a model.", needs_model=True),
    Endpoint("/slots", "GET", inspection.slots, None, "How busy the seats are."),
    Endpoint("/tokenize", "POST", inspection.tokenize, TokenizeRequest, "Text to tokens.", needs_model=True),
    Endpoint("/detokenize", "POST", inspection.detokenize, DetokenizeRequest, "Tokens to text.", needs_model=True),
    Endpoint(
        *("/apply-template", "POST", inspection.apply_template, TemplateRequest),
        "A conversation as the model reads it.",
        needs_model=True,
    ),
)


def build_app(bundles: Mapping[str, Path], settings: ServerSettings | None = None) -> Starlette:
    """The server as an ASGI application; `app.state.service` is what its requests share.

    Args:
        bundles: folders by the names that clients ask for; the first one is loaded at once.
        settings: how it is run.

    Raises:
        ConfigError: settings that contradict each other.
    """
    settings = settings or ServerSettings()
    service = Service(bundles, settings)
    files = PageFiles(shipped(Path(__file__).parent / "page" / "index.html").parent)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await app.state.kept.close()
        await service.close()

    document = openapi_document(ENDPOINTS)
    described = Endpoint("/openapi.json", "GET", _sends(document), None, "This document.")
    routes: list[BaseRoute] = [
        Route(path.replace("{model}", "{model:path}"), _Answered(service, e), methods=[e.method])
        for e in (*ENDPOINTS, described)
        for path in _both_ways(e.path)
    ]
    pages = [_page(path, files) for path in ("/", "/page/{name:path}")]
    routes += [Route(page.path, _Answered(service, page), methods=["GET"]) for page in pages]
    handlers: dict[Any, Any] = {404: _not_found, 405: _wrong_method, 500: _failed}
    app = Starlette(routes=routes, middleware=guarded(settings), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.service, app.state.kept = service, KeptAnswers(settings.limits.ping_s)
    return app


class _Answered:
    """An endpoint as an ASGI application: reads the body, ends the work with the connection, says how it went."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        service, endpoint = self._service, self._endpoint
        exchange = Exchange(scope, receive, send, service.settings.limits)
        is_left = False
        try:
            async with _telling(exchange):
                is_left = not await self._answer(exchange)
        except ClientDisconnect:
            is_left = True
        finally:
            status = CLIENT_GONE if is_left else exchange.status or 500
            service.metrics.observe_request(endpoint.path, status)
            ms = round(1e3 * (perf_counter() - started), 1)
            facts = {"request": exchange.id, "path": endpoint.path, "status": status, "ms": ms}
            _log.info("answered", extra={"facts": facts})
        if exchange.num_read > LONG_BODY or freed_memory.is_due():
            await asyncio.to_thread(freed_memory.give_back)

    async def _answer(self, exchange: Exchange) -> bool:
        service, endpoint = self._service, self._endpoint
        arguments: list[Any] = [service, exchange]
        if endpoint.body is not None:
            body = await exchange.read(endpoint.body, service.shelf.longest_context)
            arguments.append(body)
            _look_at_fields(exchange, body)
        if endpoint.needs_model and (service.is_closing or service.failure is not None):
            raise not_now(service.status)
        key = getattr(arguments[-1], "mirror_keep", None)
        if key is not None:
            return await self._keep(key, exchange, arguments[-1])
        with _naming(arguments[-1]):
            return await while_connected(exchange, lambda: endpoint.handler(*arguments))

    async def _keep(self, key: str, exchange: Exchange, body: ChatRequest) -> bool:
        """Answer into a kept answer, and follow it while the client is there."""
        if not body.stream:
            raise ApiError(400, "mirror_keep: only streams are kept.", param="mirror_keep")

        async def work(inner: Exchange) -> None:
            async with _telling(inner):
                with _naming(body):
                    await self._endpoint.handler(self._service, inner, body)

        answers = kept_answers(exchange)
        kept = answers.begin(key, exchange, work)
        return await while_connected(exchange, partial(answers.follow, key, kept, exchange))


@asynccontextmanager
async def _telling(exchange: Exchange) -> AsyncIterator[None]:
    """Answer with what goes wrong within it."""
    try:
        yield
    except ApiError as error:
        await exchange.fail(error)
    except MirrorError as error:
        if not isinstance(error, ApiError) and api_error(error).status >= 500:
            _log.warning("%s: %s", type(error).__name__, error, extra={"facts": {"request": exchange.id}})
        await exchange.fail(api_error(error))
    except ClientDisconnect:
        raise
    except Exception:
        if exchange.is_stream:  # it would break off without a word
            await exchange.fail(internal_error())
        raise


@contextmanager
def _naming(body: object) -> Iterator[None]:
    """Have what the pipeline refuses within it told by the names that the request has."""
    try:
        yield
    except (ConfigError, GenerationError) as error:
        if isinstance(body, BaseModel) and (found := api_error(error, body)).status < 500:
            raise found from error
        raise


def _look_at_fields(exchange: Exchange, body: BaseModel) -> None:
    """Refuse a field that would change the answer and is not honoured; say which ones nobody here knows."""
    refused = refused_field(body)
    if refused is not None:
        message = f"{refused.name} is not honoured, and would change the answer: {refused.advice}."
        raise ApiError(400, message, param=refused.name, code="unsupported_parameter")
    unknown = unknown_fields(body)
    if unknown:
        exchange.tell_unknown(unknown)
        _log.info("unknown fields", extra={"facts": {"request": exchange.id, "fields": unknown}})


def _both_ways(path: str) -> tuple[str, str]:
    """A path with and without `/v1`: clients differ in what they take for the server's address.

    >>> _both_ways("/v1/models"), _both_ways("/tokenize")
    (('/models', '/v1/models'), ('/tokenize', '/v1/tokenize'))
    """
    bare = path.removeprefix("/v1")
    return bare, f"/v1{bare}"


def _page(path: str, files: PageFiles) -> Endpoint:
    async def send(_: Service, exchange: Exchange) -> None:
        await files.send(exchange, exchange.request.path_params.get("name", "index.html"))

    return Endpoint(path, "GET", send, None, "The page.")


def _sends(document: dict[str, Any]) -> Handler:
    async def send(_: Service, exchange: Exchange) -> None:
        await exchange.json(document)

    return send


class _Refusing:
    """Answers what no route answers, whose body nobody has read."""

    def __init__(self, status: int, message: str, code: str) -> None:
        self._status, self._message, self._code = status, message, code

    async def __call__(self, request: Any, _: Exception) -> Any:
        limits = request.app.state.service.settings.limits
        headers = {"Allow": ", ".join(_methods_of(request))} if self._status == 405 else None
        error = ApiError(self._status, self._message, code=self._code, headers=headers)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await refuse(error, scope, receive, send, limits)

        return answer


def _methods_of(request: Any) -> list[str]:
    """The methods of a path, which may have a route for each."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    return sorted({method for route in routes for method in route.methods})


_not_found = _Refusing(404, "There is no such path here; /openapi.json lists those there are.", "not_found")
_wrong_method = _Refusing(405, "This path takes another method; /openapi.json lists them.", "method_not_allowed")


async def _failed(_: Any, __: Exception) -> Any:
    error = internal_error()
    return JSONResponse(error.body, error.status, headers={"connection": "close"})
