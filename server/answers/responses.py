"""`POST /v1/responses`: text, JSON by a schema and calls of tools, at once or as a stream of named events."""

import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any, NamedTuple

from mirrorsd.server.answers.chat import joined_systems
from mirrorsd.server.answers.choices import Delta
from mirrorsd.server.answers.figures import usage
from mirrorsd.server.answers.job import Job, bundle_of, check_continued, ping
from mirrorsd.server.answers.settings_of import (
    check_schema,
    format_settings,
    refuse_fields,
    sampled,
    template_variables,
    text_settings,
    wished,
)
from mirrorsd.server.answers.tools import Call, Wish, demanded, derived_name, plan
from mirrorsd.server.errors import ApiError
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import Exchange
from mirrorsd.server.wire.chat import FunctionDefinition, Tool
from mirrorsd.server.wire.fields import ALL
from mirrorsd.server.wire.responses import (
    AllowedNames,
    FunctionTool,
    InputText,
    ResponseRequest,
    SchemaTextFormat,
    ToolName,
)
from mirrorsd.texts.messages import text_of

_ROLES = {"developer": "system"}
_LOGPROBS = "message.output_text.logprobs"
_ABOUT_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": None}


async def responses(service: Service, exchange: Exchange, body: ResponseRequest) -> None:
    """Answer a conversation."""
    refuse_fields(
        body,
        previous_response_id="input with the whole conversation",
        conversation="input with the whole conversation",
        background=None,
        prompt="input",
    )
    if _LOGPROBS in (body.include or ()):
        raise ApiError(400, f"include: {_LOGPROBS} is not given here: use chat.", param="include")
    if body.stream:
        exchange.num_named = exchange.resumption.num_events if exchange.resumption else 0
    async with bundle_of(service, exchange, body.model, is_stream=bool(body.stream)) as bundle:
        limits = service.settings.limits
        defaults = bundle.pipe.manifest.chat_settings(body.temperature)
        settings = sampled(text_settings(body, defaults), defaults)
        settings["max_new_tokens"] = min(body.max_output_tokens or bundle.context, bundle.context)
        wanted = body.text.format if body.text is not None else None
        if isinstance(wanted, SchemaTextFormat):
            check_schema(wanted.schema_, limits, "text.format.schema")
            settings["json_schema"] = wanted.schema_
        else:
            settings |= format_settings(wanted, limits, "text.format")
        messages = joined_systems(_messages(body))
        tools = await plan(bundle, _wish(body), settings, messages, limits)
        settings = tools.settings_of(settings)
        messages, told = tools.told(messages)
        effort = body.reasoning.effort if body.reasoning is not None else None
        verbosity = body.text.verbosity if body.text is not None else None
        named = wished(None, bundle.chat_template, verbosity, effort)
        variables, unread = template_variables(bundle.chat_template, **named)
        exchange.tell_unknown([*tools.left_out, *unread])
        token_ids = await bundle.encode_chat(messages, told, variables)
        check_continued(body, 1)
        job = Job(service, exchange, body, bundle, token_ids, settings, tools=tools, kind="resp_")
        await (_stream if body.stream else _whole)(exchange, body, job)


def _wish(body: ResponseRequest) -> Wish:
    """What the request says about tools."""
    choice = body.tool_choice or "auto"
    tools = [
        Tool(type="function", function=FunctionDefinition(**tool.model_dump(exclude={"type"})))
        for tool in body.tools or ()
        if isinstance(tool, FunctionTool)
    ]
    if isinstance(choice, ToolName):
        return demanded(tools, choice.name)
    if isinstance(choice, AllowedNames):
        return Wish(tools, choice.mode, [tool.name for tool in choice.tools], body.parallel_tool_calls)
    return Wish(tools, choice, None, body.parallel_tool_calls)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """The items as messages: calls belong to the assistant's turn that they stand in, thoughts to what follows them."""
    found: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    thought = ""
    for item in body.input:
        if item.is_foreign:
            continue
        if item.type == "reasoning":
            thought += text_of(_content(item.content))
            continue
        if item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif item.type == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            found[-1].setdefault("tool_calls", []).append(call)
        else:
            role = str(item.role)
            found.append({"role": _ROLES.get(role, role), "content": _content(item.content)})
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = found[-1].get("reasoning_content", "") + thought
        thought = ""
    return found


def _content(content: str | list[InputText] | None) -> str | list[dict[str, Any]]:
    """Content as chat templates know it."""
    return content or "" if not isinstance(content, list) else [{"type": "text", "text": part.text} for part in content]


def _head(body: ResponseRequest, job: Job) -> dict[str, Any]:
    format_, choice = {"type": "text"}, body.tool_choice or "auto"
    config = job.configs[0]
    if body.text is not None and body.text.format is not None:
        format_ = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens == ALL else body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": job.bundle.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "prompt_cache_key": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": config.temperature or 0.0,
        "text": {"format": format_},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_ABOUT_TOOL | tool.model_dump() for tool in body.tools or () if isinstance(tool, FunctionTool)],
        "top_logprobs": 0,
        "top_p": config.top_p or 1.0,
        "truncation": "disabled",
        "usage": None,
        "system_fingerprint": job.bundle.fingerprint,
    }


async def _finished(head: dict[str, Any], output: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    is_whole = _status(job) == "completed"
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
        "completed_at": int(time.time()) if is_whole else None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": counted,
        **await job.figures(),
    }


def _item(name: str, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(name: str, call: Call, *, is_whole: bool) -> dict[str, Any]:
    status, arguments = ("completed", call.arguments) if is_whole else ("in_progress", "")
    about = {"type": "function_call", "call_id": call.id, "name": call.name}
    return {"id": name, **about, "arguments": arguments, "status": status}


async def _whole(exchange: Exchange, body: ResponseRequest, job: Job) -> None:
    last: dict[str, Any] = {}
    async for told in _told(body, job):
        if told.is_opening or told.is_step:
            await job.tell_front(told.delta, is_opening=told.is_opening)
        last = told.events[-1] if told.events else last
    await exchange.json(last["response"])


def _name(job: Job, kind: str, number: int) -> str:
    return f"{kind}_{derived_name(job.id, number)}"


def _status(job: Job) -> str:
    return "incomplete" if job.choices[0].finish_reason == "length" else "completed"


async def _stream(exchange: Exchange, body: ResponseRequest, job: Job) -> None:
    number = exchange.num_named or 0
    async for told in _told(body, job):
        if not told.events and told.delta is None:
            await ping(exchange)
            continue
        await exchange.begin_stream()
        for event in () if told.is_sent else told.events:
            await exchange.event(event | {"sequence_number": number}, event["type"])
            exchange.num_named = number = number + 1
        if told.delta is not None:
            await job.mark(told.delta, num_events=number)
        elif told.is_opening:
            await job.mark_beginning(num_events=number)
    await exchange.end_stream()


class _Told(NamedTuple):
    """Events that belong together, with what made them; none at all are a sign of life."""

    events: list[dict[str, Any]]
    delta: Delta | None = None
    is_sent: bool = False
    is_opening: bool = False
    is_step: bool = True


class _Output:
    """The items of an answer in their order: a message where there is text, calls behind it, and what follows them."""

    def __init__(self, job: Job) -> None:
        self.items: list[dict[str, Any]] = []
        self._job, self._messages, self._calls = job, count(), count(1)
        self._name = self._text = ""
        self._is_open = False

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._name, "output_index": len(self.items), "content_index": 0}

    def say(self, text: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a piece of text."""
        if not self._is_open:
            self._is_open, self._text, self._name = True, "", _name(self._job, "msg", next(self._messages))
            yield {
                "type": "response.output_item.added",
                "output_index": len(self.items),
                "item": _item(self._name, "in_progress", None),
            }
            yield {"type": "response.content_part.added", **self._place, "part": _part("")}
        self._text += text
        if text:
            yield {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": [], **more}

    def end_text(self, status: str) -> Iterator[dict[str, Any]]:
        """Events of a message's end; nothing where none is open."""
        if self._is_open:
            self._is_open, item = False, _item(self._name, status, self._text)
            yield {"type": "response.output_text.done", **self._place, "text": self._text, "logprobs": []}
            yield {"type": "response.content_part.done", **self._place, "part": _part(self._text)}
            yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
            self.items.append(item)

    def call(self, call: Call) -> Iterator[dict[str, Any]]:
        """Events of a call."""
        name, index = _name(self._job, "fc", next(self._calls)), len(self.items)
        place = {"item_id": name, "output_index": index}
        kind = "response.function_call_arguments"
        opened, item = (_call_item(name, call, is_whole=is_whole) for is_whole in (False, True))
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        yield {"type": f"{kind}.delta", **place, "delta": call.arguments}
        yield {"type": f"{kind}.done", **place, "arguments": call.arguments, "name": call.name}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self.items.append(item)


async def _told(body: ResponseRequest, job: Job) -> AsyncIterator[_Told]:
    """The events in their order."""
    head, output, is_open = _head(body, job), _Output(job), False
    async with job.deltas() as deltas:
        async for delta in deltas:
            if not is_open:
                is_open = True
                opening = [{"type": f"response.{kind}", "response": head} for kind in ("created", "in_progress")]
                yield _Told(opening, is_sent=job.is_begun, is_opening=True, is_step=delta is None)
            elif delta is None:
                yield _Told([])
            if delta is None:
                continue
            events: list[dict[str, Any]] = []
            extras = job.extras(delta)
            if delta.text or extras:
                events += output.say(delta.text, extras)
            for call in delta.calls:
                events += [*output.end_text("completed"), *output.call(call)]
            yield _Told(events, delta, delta.is_sent)
    events = [] if output.items else [*output.say("", {})]
    events += output.end_text(_status(job))
    last = await _finished(head, output.items, job)
    yield _Told([*events, {"type": f"response.{last['status']}", "response": last}], is_step=False)
