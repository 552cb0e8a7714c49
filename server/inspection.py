"""What the server says about itself: models, health, metrics, properties, seats, tokens."""

from contextlib import suppress
from functools import partial
from typing import Any

from mirrorsd import __version__
from mirrorsd.graphs.chat_defaults import CHECKPOINT, ChatDefaults
from mirrorsd.server.answers.chat import conversation_ends, template_messages
from mirrorsd.server.answers.job import bundle_of
from mirrorsd.server.answers.tools import Wish, plan
from mirrorsd.server.errors import ApiError
from mirrorsd.server.metrics import CONTENT_TYPE_LATEST
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.server.transport.kept import kept_answers
from mirrorsd.server.wire.completions import DetokenizeRequest, TemplateRequest, TokenizeRequest

SOURCES = {
    "window": "Drafted ahead by the small model, and confirmed by the large one.",
    "lookup": "Taken from earlier text, and confirmed by the large model.",
    "correction": "The large model's own token behind what it confirmed.",
    "plain": "Decoded by the large model alone, one token at a time.",
}
_DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


async def health(service: Service, exchange: Exchange) -> None:
    """`GET /health`: 200 where requests are taken, else 503."""
    status = service.status
    headers = {} if status == "ok" else {"Retry-After": "1"}
    await exchange.json({"status": status}, 200 if status == "ok" else 503, headers)


async def models(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models`."""
    await exchange.json({"object": "list", "data": [_model(service, name) for name in service.shelf.folders]})


async def model(service: Service, exchange: Exchange) -> None:
    """`GET /v1/models/{model}`."""
    await exchange.json(_model(service, service.shelf.known(exchange.request.path_params["model"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    created = 0
    with suppress(OSError):  # a folder that is away for a moment; whoever asks for a text is told
        created = int(service.shelf.folders[name].stat().st_mtime)
    return {"id": name, "object": "model", "created": created, "owned_by": "mirrorsd"}


async def metrics(service: Service, exchange: Exchange) -> None:
    """`GET /metrics`."""
    await exchange.whole(service.metrics.text(), {"content-type": CONTENT_TYPE_LATEST})


async def resume(service: Service, exchange: Exchange) -> None:
    """`GET /v1/answers/{key}`: an answer that was asked for with `mirror_keep`, from its start; 204 where none is."""
    if not await kept_answers(exchange).read(exchange.request.path_params["key"], exchange):
        await exchange.whole(b"", {}, 204)


async def cancel(service: Service, exchange: Exchange) -> None:
    """`DELETE /v1/answers/{key}`: end such an answer, if it is there."""
    key = exchange.request.path_params["key"]
    await exchange.json({"id": key, "cancelled": kept_answers(exchange).cancel(key)})


async def props(service: Service, exchange: Exchange) -> None:
    """`GET /props`: what a program that shows answers wants to know of the model."""
    async with bundle_of(service, exchange, exchange.request.query_params.get("model")) as bundle:
        pipe = bundle.pipe
        target, draft = pipe.manifest.target, pipe.manifest.draft
        own = ChatDefaults(generation=pipe.manifest.generation, source=CHECKPOINT)
        defaults = pipe.manifest.chat_defaults if bundle.chat_template else own
        document = {
            "model": bundle.name,
            "models": list(service.shelf.folders),
            "system_fingerprint": bundle.fingerprint,
            "version": __version__,
            "context": bundle.context,
            "device_map": pipe.device_map.name,
            "layout": pipe.layout,
            "placement": pipe.placement,
            "methods": list(pipe.methods),
            "defaults": {name: defaults.generation.get(name) for name in _DEFAULTS} | {"max_tokens": None},
            "defaults_source": defaults.source,
            "target": _part(target.source.name, target.source.num_parameters, target.precision),
            "draft": _part(draft.source.name, draft.source.num_parameters, draft.precision),
            "has_chat_template": bool(bundle.chat_template),
            "total_slots": service.settings.seats,
            "bytes_per_slot": bundle.bytes_per_seat,
            "queue": service.settings.queue,
            "advice": pipe.advice,
            "plain_tokens_per_second": bundle.plain_tokens_per_second({}),
            "sources": SOURCES,
        }
        await exchange.json(document)


def _part(name: str, parameters: int, precision: str) -> dict[str, Any]:
    return {"name": name, "parameters": parameters, "precision": precision}


async def slots(service: Service, exchange: Exchange) -> None:
    """`GET /slots`: how busy the seats are; never whose text is on them."""
    count = service.settings.seats
    found = [
        {"id": number, "model": name, "is_processing": number < bundle.num_running, "n_ctx": bundle.context}
        for name, bundle in service.shelf.loaded.items()
        for number in range(count)
    ]
    await exchange.json(found)


async def tokenize(service: Service, exchange: Exchange, body: TokenizeRequest) -> None:
    """`POST /tokenize`."""
    if not body.parse_special:
        raise ApiError(400, "parse_special: special tokens in a text are always read as such.", param="parse_special")
    async with bundle_of(service, exchange, body.model) as bundle:
        tokens: list[Any] = await bundle.tokenize(body.content, add_special=body.add_special) if body.content else []
        if body.with_pieces:
            tokens = [{"id": token, "piece": _piece(bundle.tokenizer.token_bytes(token))} for token in tokens]
        await exchange.json({"tokens": tokens})


def _piece(raw: bytes) -> str | list[int]:
    """A token's text, spaces included; the bytes of one that has only a part of a character.

    >>> _piece(b" fox"), _piece(bytes([195]))
    (' fox', [195])
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(service: Service, exchange: Exchange, body: DetokenizeRequest) -> None:
    """`POST /detokenize`."""
    async with bundle_of(service, exchange, body.model) as bundle:
        size = bundle.pipe.manifest.target.shape.vocab_size
        wrong = next((place for place, token in enumerate(body.tokens) if token >= size), None)
        if wrong is not None:
            raise ApiError(400, f"tokens.{wrong}: ids must be below {size}.", param="tokens")
        content = b"".join(map(bundle.tokenizer.token_bytes, body.tokens)).decode("utf-8", "replace")
        await exchange.json({"content": content})


async def apply_template(service: Service, exchange: Exchange, body: TemplateRequest) -> None:
    """`POST /apply-template`: a conversation as the model reads it."""
    async with bundle_of(service, exchange, body.model) as bundle:
        messages = template_messages(body.messages)
        tools = await plan(bundle, Wish(body.tools or ()), {}, messages, service.settings.limits)
        messages, told = tools.told(messages)
        variables = body.chat_template_kwargs or {}
        render = partial(bundle.tokenizer.render_chat, messages, told, variables, **conversation_ends(body))
        await exchange.json({"prompt": await bundle.read([messages, told, variables], render)})
