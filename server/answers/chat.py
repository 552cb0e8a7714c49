"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mirrorsd.server.answers.choices import Choice, Delta
from mirrorsd.server.answers.figures import usage
from mirrorsd.server.answers.job import Job, bundle_of, check_continued, ping
from mirrorsd.server.answers.logprobs import chat_logprobs
from mirrorsd.server.answers.settings_of import chat_settings, sampled, template_variables, wished
from mirrorsd.server.answers.tools import Call, Wish, demanded, plan
from mirrorsd.server.errors import ApiError
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import DONE, Exchange
from mirrorsd.server.wire.chat import AllowedChoice, ChatRequest, Message, NamedChoice, text_of
from mirrorsd.server.wire.completions import TemplateRequest
from mirrorsd.texts.messages import text_of as read_text

_ROLES = {"developer": "system", "function": "tool"}


async def chat(service: Service, exchange: Exchange, body: ChatRequest) -> None:
    """Answer a conversation, at once or as a stream."""
    async with bundle_of(service, exchange, body.model, is_stream=bool(body.stream)) as bundle:
        limits = service.settings.limits
        defaults = bundle.pipe.manifest.chat_settings(body.temperature)
        settings = sampled(chat_settings(body, defaults, limits), defaults)
        messages = template_messages(body.messages)
        tools = await plan(bundle, _wish(body), settings, messages, limits)
        settings = tools.settings_of(settings)
        most = body.max_completion_tokens or body.most_tokens
        settings["max_new_tokens"] = min(most or bundle.context, bundle.context)
        if body.prediction is not None:
            settings["prediction"] = await bundle.predict(text_of(body.prediction.content))
        messages, told = tools.told(messages)
        wishes = wished(body.reasoning, bundle.chat_template, body.verbosity, body.reasoning_effort)
        named, unread = template_variables(bundle.chat_template, documents=body.documents, **wishes)
        exchange.tell_unknown([*tools.left_out, *unread])
        variables = {**(body.chat_template_kwargs or {}), **named}
        token_ids = await bundle.encode_chat(messages, told, variables, **conversation_ends(body))
        check_continued(body, body.n or 1)
        job = Job(service, exchange, body, bundle, token_ids, settings, body.n or 1, tools)
        await (_stream if body.stream else _whole)(exchange, body, job)


def conversation_ends(body: ChatRequest | TemplateRequest) -> dict[str, bool]:
    """How the text of the conversation ends, as in transformers."""
    is_continued = body.continue_final_message
    if is_continued and body.add_generation_prompt:
        message = "continue_final_message goes on with a turn, and add_generation_prompt begins one: give one of them."
        raise ApiError(400, message, param="continue_final_message")
    begins = not is_continued if body.add_generation_prompt is None else body.add_generation_prompt
    return {"add_generation_prompt": begins, "continue_final_message": is_continued}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them."""
    return joined_systems([_template_message(message) for message in messages])


def joined_systems(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""The same with one system message where several begin it, as agents send: many templates take or write only one.

    >>> joined_systems([{"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}])
    [{'role': 'system', 'content': 'Be kind.\n\nBe brief.'}]
    """
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(first) < 2:
        return list(messages)
    texts = (read_text(message.get("content")) for message in first)
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *messages[len(first) :]]


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates know it, with every field that it has."""
    found = message.model_dump(exclude_none=True)
    if not found.get("tool_calls", True):
        del found["tool_calls"]
    if found.get("content") is None and isinstance(found.get("refusal"), str):
        found["content"] = found.pop("refusal")  # another model's, as the parts of that kind
    return {**found, "role": _ROLES.get(message.role, message.role)}


def _wish(body: ChatRequest) -> Wish:
    """What the request says about tools."""
    choice, tools = body.tool_choice or "auto", body.tools or ()
    if isinstance(choice, NamedChoice):
        return demanded(tools, choice.function.name)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return Wish(tools, allowed.mode, [tool.function.name for tool in allowed.tools], body.parallel_tool_calls)
    return Wish(tools, choice, None, body.parallel_tool_calls)


def _head(job: Job, kind: str) -> dict[str, Any]:
    head = {"id": job.id, "object": kind, "created": job.created}
    return {**head, "model": job.bundle.name, "system_fingerprint": job.bundle.fingerprint}


async def _whole(exchange: Exchange, body: ChatRequest, job: Job) -> None:
    head = _head(job, "chat.completion")
    await job.finish()
    choices = [_finished(job, choice, has_logprobs=bool(body.logprobs)) for choice in job.choices]
    more: dict[str, Any] = await job.figures()
    if body.mirror_tokens:
        more["mirror_tokens"] = [list(piece) for piece in job.choices[0].pieces]
    await exchange.json({**head, "choices": choices, "usage": usage(job.results), **more})


def _finished(job: Job, choice: Choice, *, has_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [call.document for call in choice.calls]}
    logprobs = {"content": chat_logprobs(job.bundle, choice.tokens), "refusal": None} if has_logprobs else None
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


async def _stream(exchange: Exchange, body: ChatRequest, job: Job) -> None:
    head = _head(job, "chat.completion.chunk")
    has_usage: dict[str, Any] = {"usage": None} if body.wants_usage else {}
    is_open = False
    async with job.deltas() as deltas:
        async for delta in deltas:
            if delta is None and is_open:
                await ping(exchange)
                continue
            if not is_open:
                is_open = True
                opening = {"role": "assistant", "content": "", "refusal": None}
                shown = [_choice(choice.index, opening) for choice in job.choices]
                await job.begin([{**head, "choices": [choice], **has_usage} for choice in shown])
            if delta is not None:
                if not delta.is_sent:
                    await _send(exchange, job, head | has_usage, delta)
                await job.mark(delta)
    if body.wants_usage:
        await exchange.event({**head, "choices": [], "usage": usage(job.results)})
    await exchange.frame(DONE)
    await exchange.end_stream()


async def _send(exchange: Exchange, job: Job, head: dict[str, Any], delta: Delta) -> None:
    choice = job.choices[delta.choice]
    has_logprobs = bool(job.settings.get("logprobs"))
    logprobs = {"content": chat_logprobs(job.bundle, delta.tokens), "refusal": None} if has_logprobs else None
    extras = job.extras(delta)
    if delta.text or (has_logprobs and delta.tokens) or extras:
        said = {"content": delta.text} if delta.text or delta.tokens else {}
        await exchange.event({**head, "choices": [_choice(delta.choice, said, logprobs)], **extras})
    if delta.calls:
        first = len(choice.calls) - len(delta.calls)
        for piece in _call_pieces(delta.calls, first):
            await exchange.event({**head, "choices": [_choice(delta.choice, {"tool_calls": [piece]})]})
    if delta.is_last:
        is_end = len(job.results) == len(job.choices)
        more = await job.figures() if is_end else {}
        last = {**_choice(delta.choice, {}), "finish_reason": choice.finish_reason}
        await exchange.event({**head, "choices": [last], **more})


def _call_pieces(calls: Sequence[Call], first: int) -> list[dict[str, Any]]:
    """Two pieces a call: clients add up the arguments, and want id, type and name exactly once."""
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls, start=first):
        opening = {"name": call.name, "arguments": ""}
        found.append({"index": index, "id": call.id, "type": "function", "function": opening})
        found.append({"index": index, "function": {"arguments": call.arguments}})
    return found


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
