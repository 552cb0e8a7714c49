"""Conversations as callers bring them, and the forms in which a chat template may want them.

Owns: which messages are taken, what of them a template sees, and how parts of a content become one text. Does not own:
templates (`chat_template.py`).
"""

import dataclasses
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from reprlib import repr as shortened
from typing import Any

import numpy as np

from mirrorsd.graphs.errors import GenerationError

Message = Mapping[str, Any]
Conversation = list[dict[str, Any]]

_FORM = 'expected a list like [{"role": "user", "content": "..."}]'
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which clients send what a model thought, the one that counts first."""
_CALLS = ("tool_calls", "function_call")
_PART_END = "\n"
ID_LENGTH = 9
"""Of a call's id: letters and digits. Mistral's templates refuse others."""
_ABSENT = object()


def joined_text(parts: Sequence[Message]) -> str:
    """A content in parts as one text: a line or more for each part.

    >>> joined_text([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]).splitlines()
    ['one', 'two']
    """
    return _PART_END.join(part["text"] for part in parts)


def text_of(content: str | Sequence[Message] | None) -> str:
    """A content of any form as one text."""
    return content if isinstance(content, str) else joined_text(content or ())


def read_messages(messages: object) -> Conversation:
    """Check a conversation and leave in it what a chat template may see.

    A key whose value is None disappears. Values become JSON's own: a pydantic model or a dataclass becomes a mapping.
    Reasoning is there under each name that templates know. A content in parts stays in parts. An assistant's content
    may be missing beside its calls or its reasoning: it is None then.

    Raises:
        GenerationError: another form: which message, what was found, what is expected.
    """
    if not isinstance(messages, list | tuple):
        raise GenerationError(f"messages is {shortened(messages)}; {_FORM}.")
    if not messages:
        raise GenerationError("The list of messages is empty: give at least one {'role': ..., 'content': ...}.")
    return [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def plain_value(value: Any, where: str) -> Any:
    """A value as JSON has it, without the methods of richer types, which no template needs.

    Args:
        value: numbers, texts, None, lists, tuples and mappings; pydantic models and dataclasses count as mappings.
        where: what an error calls it.

    Raises:
        GenerationError: it holds something else, or itself.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise GenerationError(f"{where} is nested too deeply, or holds itself; allowed: JSON values.") from None


def forms(messages: Conversation) -> Iterator[Conversation]:
    """The conversation in the forms that templates want, the usual one first.

    A content that is missing is an empty text, absent, or None. The arguments of a call are an object, or JSON text.
    A content in parts stays as it is, or becomes one text. What templates refuse comes last, in another way: system
    messages are said by the user, ids of calls are short, thoughts stand in the content beside calls, calls that came
    at once come one by one. Only forms that differ are given.
    """
    for changes in product(*((None, change) for change in _CHANGES)):
        changed = messages
        for change in filter(None, changes):
            changed = change(changed)
        is_new = all(change(messages) != messages for change in filter(None, changes))
        if is_new:
            yield from _usual_forms(changed)


def _usual_forms(messages: Conversation) -> Iterator[Conversation]:
    lacks_content = any(message["content"] is None for message in messages)
    has_calls = any(message.get(name) for message in messages for name in _CALLS)
    in_parts = places_in_parts(messages)
    for joined, as_object, lack in product(
        ([], in_parts) if in_parts else ([],),
        (True, False) if has_calls else (True,),
        ("", _ABSENT, None) if lacks_content else ("",),
    ):
        form = with_joined_parts(messages, joined)
        yield [_with_calls(_with_content(message, lack), as_object=as_object) for message in form]


def _told_by_user(messages: Conversation) -> Conversation:
    """What the system says at the beginning of the user's next message, or as one where none follows at once."""
    found: Conversation = []
    for message in messages:
        told = found[-1] if found and found[-1].get("role") == "system" else None
        if told is not None and message["role"] in ("system", "user"):
            both = f"{text_of(told['content'])}\n\n{text_of(message['content'])}"
            found[-1] = {**message, "content": both}
        elif told is not None:
            found[-1:] = [{**told, "role": "user"}, message]
        else:
            found.append(message)
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in found]


def _with_short_ids(messages: Conversation) -> Conversation:
    """Ids of calls in so many letters and digits as Mistral's templates want."""

    def short(given: Any) -> Any:
        if not isinstance(given, str) or (len(given) == ID_LENGTH and re.fullmatch(r"[A-Za-z0-9]+", given)):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:ID_LENGTH]

    def changed(found: Message, name: str) -> dict[str, Any]:
        return {**found, name: short(found[name])} if name in found else dict(found)

    found = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            named = [changed(call, "id") if isinstance(call, Mapping) else call for call in calls]
            message = {**message, "tool_calls": named}
        found.append(changed(message, "tool_call_id"))
    return found


def _with_thoughts_said(messages: Conversation) -> Conversation:
    """Thoughts at the beginning of the content, where a message has both beside calls: gpt-oss's template takes one."""
    return [
        {name: value for name, value in message.items() if name not in _REASONING}
        | {"content": f"{message['reasoning_content']}\n\n{text_of(message['content'])}"}
        if message.get("tool_calls") and message.get("reasoning_content") and message["content"]
        else message
        for message in messages
    ]


def _with_calls_apart(messages: Conversation) -> Conversation:
    """Calls that came at once, each in a turn of its own before its result: Llama's templates write one at a time."""
    found: Conversation = []
    turns = deque(messages)
    while turns:
        message = turns.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            found.append(message)
            continue
        results = []
        while turns and turns[0]["role"] == "tool":
            results.append(turns.popleft())
        ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
        given = [result.get("tool_call_id") for result in results]
        owners = [ids.index(one) if one and one in ids else min(n, len(ids) - 1) for n, one in enumerate(given)]
        later = {name: value for name, value in message.items() if name not in _REASONING} | {"content": ""}
        for number, call in enumerate(calls):
            found.append({**(later if number else message), "tool_calls": [call]})
            found += [result for owner, result in zip(owners, results, strict=True) if owner == number]
    return found


_CHANGES = (_with_calls_apart, _told_by_user, _with_short_ids, _with_thoughts_said)


def with_joined_parts(messages: Conversation, places: Sequence[int]) -> Conversation:
    """The conversation with the contents at these places as one text each."""
    return [
        {**message, "content": joined_text(message["content"])} if place in places else message
        for place, message in enumerate(messages)
    ]


def places_in_parts(messages: Conversation) -> list[int]:
    """Which messages have a content in parts."""
    return [place for place, message in enumerate(messages) if isinstance(message["content"], list | tuple)]


def _read_message(message: object, where: str) -> dict[str, Any]:
    if _is_record(message):
        message = plain_value(message, where)
    if not isinstance(message, Mapping):
        raise GenerationError(f"{where} is {shortened(message)}; {_FORM}.")
    if not isinstance(message.get("role"), str):
        raise GenerationError(f"{where} has the role {message.get('role')!r}; {_FORM}.")
    given = message if "content" in message else {"role": message["role"], "content": None, **message}
    read = {
        name: plain_value(value, f"{where}.{name}")
        for name, value in given.items()
        if value is not None or name == "content"
    }
    reasoning = next((read[name] for name in _REASONING if name in read), None)
    if reasoning is not None:
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    content = read["content"]
    if isinstance(content, list | tuple):
        for place, part in enumerate(content):
            _check_part(part, f"{where}, part {place}")
    elif content is None and not _may_lack_content(read):
        raise GenerationError(
            f"{where} has no content; only an assistant's with tool_calls or reasoning_content may lack it; {_FORM}."
        )
    elif content is not None and not isinstance(content, str):
        raise GenerationError(
            f"{where} has the content {shortened(content)}; allowed: a text, or a list of text parts."
        )
    return read


def _may_lack_content(message: Message) -> bool:
    return message["role"] == "assistant" and any(message.get(name) for name in (*_CALLS, "reasoning_content"))


def _check_part(part: object, where: str) -> None:
    if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
        raise GenerationError(
            f'{where}, is {shortened(part)}; allowed: {{"type": "text", "text": "..."}}. Bundles read text only.'
        )


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), where)
    if isinstance(value, list | tuple):
        items = (_plain(item, f"{where}[{place}]") for place, item in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    if _is_record(value):
        is_model = hasattr(value, "model_dump")
        value = value.model_dump() if is_model else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        raise GenerationError(
            f"{where} is {shortened(value)}; allowed: JSON values (texts, numbers, true, false, null, lists, objects)."
        )
    return {_plain(name, where): _plain(item, f"{where}.{name}") for name, item in value.items()}


def _is_record(value: object) -> bool:
    """Whether it is a pydantic model or a dataclass."""
    return not isinstance(value, type) and (hasattr(value, "model_dump") or dataclasses.is_dataclass(value))


def _with_content(message: Message, lack: object) -> dict[str, Any]:
    """The message with `lack` in place of a content that is missing."""
    if message["content"] is None and lack is _ABSENT:
        return {name: value for name, value in message.items() if name != "content"}
    return {**message, "content": lack if message["content"] is None else message["content"]}


def _with_calls(message: dict[str, Any], *, as_object: bool) -> dict[str, Any]:
    """The message with the arguments of its calls as an object, where they are one, or as JSON text."""
    found = dict(message)
    calls = found.get("tool_calls")
    if isinstance(calls, list | tuple):
        found["tool_calls"] = [_with_arguments(call, as_object=as_object) for call in calls]
    if isinstance(found.get("function_call"), Mapping):
        found["function_call"] = _with_arguments(found["function_call"], as_object=as_object)
    return found


def _with_arguments(call: Any, *, as_object: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    found = dict(call)
    if isinstance(found.get("function"), Mapping):
        found["function"] = _with_arguments(found["function"], as_object=as_object)
    if "arguments" in found:
        found["arguments"] = (_object_of if as_object else json_of)(found["arguments"])
    return found


def _object_of(arguments: Any) -> Any:
    """Arguments that are a JSON object in a text as that object; none at all are an empty one.

    >>> _object_of('{"at": "sky"}'), _object_of(""), _object_of("[1]"), _object_of("{half")
    ({'at': 'sky'}, {}, '[1]', '{half')
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def json_of(arguments: Any) -> str:
    """Arguments as JSON text; none at all are an empty object.

    >>> json_of({"at": "sky"}), json_of(""), json_of(None)
    ('{"at": "sky"}', '{}', '{}')
    """
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(arguments or {}, ensure_ascii=False)
