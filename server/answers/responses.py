"""`POST /v1/responses`: text and JSON by a schema, at once or as a stream of named events."""

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from mirrorsd.server.answers.figures import usage
from mirrorsd.server.answers.job import Job, ping
from mirrorsd.server.answers.settings_of import check_schema, format_settings, refuse_fields, text_settings
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.server.wire.responses import InputMessage, ResponseRequest, SchemaTextFormat

_ROLES = {"developer": "system"}


async def responses(service: Service, exchange: Exchange, body: ResponseRequest) -> None:
    """Answer a conversation."""
    refuse_fields(
        body,
        tools="/v1/chat/completions",
        previous_response_id="input with the whole conversation",
        conversation="input with the whole conversation",
        background=None,
        prompt="input",
    )
    async with service.shelf.use(body.model) as bundle:
        limits = service.settings.limits
        settings = text_settings(body, bundle.pipe.manifest.generation)
        settings["max_new_tokens"] = min(body.max_output_tokens or bundle.context, bundle.context)
        wanted = body.text.format if body.text is not None else None
        if isinstance(wanted, SchemaTextFormat):
            check_schema(wanted.schema_, limits, "text.format.schema")
            settings["json_schema"] = wanted.schema_
        else:
            settings |= format_settings(wanted, limits, "text.format")
        token_ids = await bundle.encode(messages=_messages(body))
        job = Job(service, body, bundle, token_ids, settings)
        await (_stream if body.stream else _whole)(exchange, body, job)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    found = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    turns = [{"role": _ROLES.get(turn.role, turn.role), "content": _content(turn)} for turn in body.input]
    return [*found, *turns]


def _content(turn: InputMessage) -> Any:
    """As chat templates know it."""
    if isinstance(turn.content, str):
        return turn.content
    return [{"type": "text", "text": part.text} for part in turn.content]


def _head(body: ResponseRequest, job: Job) -> dict[str, Any]:
    format_ = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        format_ = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": job.bundle.name,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": format_},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "system_fingerprint": job.bundle.fingerprint,
    }


async def _finished(head: dict[str, Any], item: dict[str, Any], job: Job) -> dict[str, Any]:
    is_whole = job.choices[0].finish_reason != "length"
    counts = usage(job.results)
    counted = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    return head | {
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": [item],
        "usage": counted,
        **await job.figures(),
    }


def _item(name: str, job: Job, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _whole(exchange: Exchange, body: ResponseRequest, job: Job) -> None:
    head = _head(body, job)
    await job.finish()
    item = _item(f"msg_{uuid4().hex}", job, _status(job), job.choices[0].text)
    await exchange.json(await _finished(head, item, job))


def _status(job: Job) -> str:
    return "incomplete" if job.choices[0].finish_reason == "length" else "completed"


async def _stream(exchange: Exchange, body: ResponseRequest, job: Job) -> None:
    number = 0
    async for event in _events(body, job):
        if event is None:
            await ping(exchange)
            continue
        await exchange.begin_stream()
        name = event["type"]
        await exchange.event(event | {"sequence_number": number}, name)
        number += 1
    await exchange.end_stream()


async def _events(body: ResponseRequest, job: Job) -> AsyncIterator[dict[str, Any] | None]:
    """The events in their order; None where the client only needs to see that somebody is there."""
    head, name = _head(body, job), f"msg_{uuid4().hex}"
    place = {"item_id": name, "output_index": 0, "content_index": 0}
    is_open = False
    async with job.deltas() as deltas:
        async for delta in deltas:
            if not is_open:
                is_open = True
                for kind in ("created", "in_progress"):
                    yield {"type": f"response.{kind}", "response": head}
                opened = _item(name, job, "in_progress", None)
                yield {"type": "response.output_item.added", "output_index": 0, "item": opened}
                yield {"type": "response.content_part.added", **place, "part": _part("")}
            elif delta is None:
                yield None
            if delta is not None and delta.text:
                said = {"delta": delta.text, "logprobs": [], **job.extras(delta)}
                yield {"type": "response.output_text.delta", **place, **said}
    text = job.choices[0].text
    item = _item(name, job, _status(job), text)
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": _part(text)}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    last = await _finished(head, item, job)
    yield {"type": f"response.{last['status']}", "response": last}
