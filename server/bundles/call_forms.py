"""How a model writes calls of tools: read out of its chat template, or our own form where that has none.

A template is asked: it writes a conversation in which two made-up tools were called, and what stands around their names
and arguments is the form. So every family that writes arguments as JSON is known without being named here. Owns: the
form, and our own way to tell a model about tools. Does not own: the grammar and the reading of answers (`tools.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mirrorsd.graphs.errors import MirrorError
from mirrorsd.texts.channels import CALL_CLOSING, CALL_MIDDLE, CALL_OPENING
from mirrorsd.texts.messages import json_of

ID_MARK = "\0"
"""Stands in a form's texts where the template writes a call's id."""
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Mapping[str, Any]], bool], str]
_NAMES = ("probe_one", "probe_two")
_IDS = ("aaaa0aaa1", "bbbb0bbb1")
_RESULT = "It is so."
_ARGUMENTS: tuple[dict[str, Any], ...] = ({"first_key": "first value"}, {"second_key": "second value"})


@dataclass(frozen=True, slots=True)
class CallForm:
    """What stands around the names and arguments of calls.

    Attributes:
        opening: before the first name.
        middle: between a name and its arguments, which are JSON.
        separator: between arguments and the next name; None where one call is all that the form has.
        closing: behind the last arguments.
        is_own: the template has no form: tools, calls and results are told in plain messages.
        is_in_channels: it is what texts in channels are told as; the model writes their marks.
    """

    opening: str
    middle: str
    separator: str | None
    closing: str
    is_own: bool = False
    is_in_channels: bool = False

    @property
    def marker(self) -> str:
        """What no text but a call has: the opening up to its first space, quote or brace; empty where there is none.

        >>> OWN.marker
        '<tool_call>'
        """
        found = re.match(r"<[^<>\s]+>|\[[A-Z_]+\]|[^\s\"'{\[]+", self.opening)
        return found[0] if found else ""

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as text; arguments are JSON text."""
        between = self.separator if self.separator is not None else f"{self.closing}\n{self.opening}"
        return self.opening + between.join(f"{name}{self.middle}{given}" for name, given in calls) + self.closing


class Speech(NamedTuple):
    """What of a bundle decides how calls come: its form, its special tokens by text, those that end, its context."""

    form: CallForm
    specials: Mapping[str, int]
    eos_ids: Sequence[int]
    context: int


OWN = CallForm(CALL_OPENING, CALL_MIDDLE, f"{CALL_CLOSING}\n{CALL_OPENING}", CALL_CLOSING, is_own=True)
IN_CHANNELS = CallForm(CALL_OPENING, CALL_MIDDLE, None, CALL_CLOSING, is_in_channels=True)


def read_form(render: Render, ends: Sequence[str]) -> CallForm:
    """The form of a template.

    Args:
        render: writes messages with these tools, up to where the assistant speaks if the last argument is true.
        ends: texts of the tokens that end an answer.
    """
    try:
        tools = [_tool(name) for name in _NAMES]
        prompt = render([_user()], tools, True)
        if _NAMES[0] not in prompt:
            return OWN
        one = _cut(render(_called(1), tools, False), prompt)
    except MirrorError:
        return OWN
    found = _placed(one, 0)
    if found is None:
        return OWN
    opening, middle, rest = found[0].lstrip(), found[1], found[2]
    closing = _closing(rest, ends)
    if not opening or closing is None or _RESULT in closing:  # whose turn ends behind the results alone
        return OWN
    try:
        separator = _separator(_cut(render(_called(2), tools, False), prompt), middle)
    except MirrorError:
        separator = None
    between = None if separator is None else _with_mark(separator)
    return CallForm(opening, _with_mark(middle), between, _with_mark(closing))


def told_plainly(messages: Messages, tools: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: all about them becomes text of usual messages."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if found and found[-1].get("is_result"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            called = [
                (call["function"]["name"], json_of(call["function"]["arguments"])) for call in message["tool_calls"]
            ]
            said = _text(message)
            found.append(
                {"role": "assistant", "content": f"{said}\n{form.written(called)}" if said else form.written(called)}
            )
        elif message["role"] == "user" and found and found[-1].get("is_result"):
            found[-1] = {"role": "user", "content": f"{found[-1]['content']}\n{_text(message)}"}
        else:
            found.append(dict(message))
    if tools:
        _introduce(found, _introduction(tools, form))
    return [{key: value for key, value in message.items() if key != "is_result"} for message in found]


def _introduction(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False, separators=(",", ":")) for tool in tools)
    example = form.written([("NAME", "{...}")])
    return (
        f"You can call these tools:\n{described}\nTo call one, write only:\n{example}\n"
        "Its result follows as <tool_response>. Else answer in words."
    )


def _introduce(messages: list[dict[str, Any]], text: str) -> None:
    """Put a text where the model reads it first."""
    place = next((place for place, message in enumerate(messages) if message["role"] == "system"), None)
    if place is None:
        messages.insert(0, {"role": "system", "content": text})
    else:
        messages[place] = {**messages[place], "content": f"{_text(messages[place])}\n\n{text}"}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "What is it?"}


def _tool(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "A key."} for given in _ARGUMENTS for key in given}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def _called(count: int) -> list[dict[str, Any]]:
    """A conversation with so many calls in one turn, their results, and a turn behind them."""
    numbers = range(count)
    calls = [
        {"id": _IDS[n], "type": "function", "function": {"name": _NAMES[n], "arguments": _ARGUMENTS[n]}}
        for n in numbers
    ]
    results = [{"role": "tool", "name": _NAMES[n], "tool_call_id": _IDS[n], "content": _RESULT} for n in numbers]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return [_user(), said, *results, {"role": "assistant", "content": "So."}, _user()]


def _cut(text: str, prompt: str) -> str:
    """What follows the prompt's end, which is what stands behind its question; further up both may differ.

    Templates tell of tools before the last question, or the first one. A mark is not cut apart: of `<think>` that a
    prompt ends with and `<tool_call>` in its place, nothing is common.
    """
    asked = str(_user()["content"])
    if asked in text and asked in prompt:
        text, prompt = text.partition(asked)[2], prompt.rpartition(asked)[2]
    same = next((place for place, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(prompt))
    begun = re.search(r"[<\[][^<>\[\]\s]*$", text[:same])
    return text[begun.start() if begun else same :]


def _placed(text: str, number: int) -> tuple[str, str, str] | None:
    """What stands before a call's name, between the name and the arguments, and behind them."""
    before, name, rest = text.partition(_NAMES[number])
    start = rest.find("{")
    while name and start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(rest, start)
        except ValueError:
            value, end = None, 0
        if value == _ARGUMENTS[number]:
            return before, rest[:start], rest[end:]
        start = rest.find("{", start + 1)
    return None


def _closing(rest: str, ends: Sequence[str]) -> str | None:
    places = [rest.find(end) for end in ends if end and end in rest]
    return rest[: min(places)].rstrip("\n") if places else None


def _separator(text: str, middle: str) -> str | None:
    """What stands between two calls; None where the template writes one only, or their results between them."""
    first = _placed(text, 0)
    if first is None or first[1] != middle:
        return None
    second = _placed(first[2], 1)
    if second is None or _RESULT in second[0] or second[1].replace(_IDS[1], _IDS[0]) != middle:
        return None
    return second[0]


def _with_mark(text: str) -> str:
    for given in _IDS:
        text = text.replace(given, ID_MARK)
    return text
