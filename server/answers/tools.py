"""Tools: what a choice of tools demands of the text, and calls read out of it.

Where a call is demanded, the text is constrained to one by a JSON schema, whatever the family. Where the model may
choose, it writes calls in its family's own form, which is known by its chat template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from mirrorsd.server.answers.settings_of import check_schema
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import ChatRequest, NamedChoice, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_COMPACT = {"whitespace_flexible": False}
"""For llguidance: a call is read by programs, and a small model may write spaces between its parts for ever."""


class Call(NamedTuple):
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def document(self) -> dict[str, Any]:
        """As in an answer."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Read(NamedTuple):
    """What a piece of text turned out to be: text to show, calls that are complete."""

    text: str
    calls: Sequence[Call] = ()


class Reader:
    """Reads an answer that has no calls: all of it is text."""

    def push(self, text: str) -> Read:
        """What is certain with this piece."""
        return Read(text)

    def finish(self) -> Read:
        """What is left at the end."""
        return Read("")


class DemandedCall(Reader):
    """Reads an answer that is one call, as JSON from its first character to its last."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> Read:
        """Nothing is certain before the end."""
        self._text += text
        return Read("")

    def finish(self) -> Read:
        """The call, or where the text was cut short its beginning as text."""
        call = _call_of(self._text)
        return Read("", [call]) if call else Read(self._text)


class TaggedCalls(Reader):
    """Reads calls between `<tool_call>` and `</tool_call>` (Hermes, Qwen) out of text; what is no call stays text."""

    def __init__(self) -> None:
        self._held = self._lines = ""
        self._is_behind_call = False

    def push(self, text: str) -> Read:
        """Text up to the next call that has begun or may begin, and the calls that have ended."""
        self._held += text
        shown, calls = "", []
        while (start := self._held.find(_OPEN)) >= 0:
            stop = self._held.find(_CLOSE, start)
            if stop < 0:
                break
            call = _call_of(self._held[start + len(_OPEN) : stop])
            end = stop + len(_CLOSE)
            shown += self._show(self._held[: start if call else end])
            if call:
                calls.append(call)
                self._lines, self._is_behind_call = "", True
            self._held = self._held[end:]
        keep = len(self._held) - start if start >= 0 else _begins(self._held, _OPEN)
        shown += self._show(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return Read(shown, calls)

    def finish(self) -> Read:
        """What is left: a call that only lacks its end mark, or text."""
        held, self._held = self._held, ""
        call = _call_of(held.removeprefix(_OPEN)) if held.startswith(_OPEN) else None
        return Read("", [call]) if call else Read(self._show(held) + self._lines)

    def _show(self, text: str) -> str:
        """Hold line ends back: beside a call they belong to its form."""
        if self._is_behind_call:
            text = text.lstrip("\n")
            self._is_behind_call = not text
        text = self._lines + text
        shown = text.rstrip("\n")
        self._lines = text[len(shown) :]
        return shown


class ToolPlan(NamedTuple):
    """What tools demand of a request: what the template is told, the schema of a demanded call, who reads calls."""

    tools: Sequence[dict[str, Any]] = ()
    schema: dict[str, Any] | None = None
    reads_tags: bool = False

    def reader(self) -> Reader:
        """A reader for one choice."""
        if self.schema is not None:
            return DemandedCall()
        return TaggedCalls() if self.reads_tags else Reader()


def plan_tools(body: ChatRequest, template: str, limits: Limits) -> ToolPlan:
    """What the request's tools demand; `template` is the text of the chat template.

    Raises:
        ApiError: too many or too big, a tool that is not there, or a free choice that this family has no form for.
    """
    tools, choice = body.tools or [], body.tool_choice
    _check(tools, limits)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice demands a tool, but no tools are given.", param="tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    documents = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice in (None, "auto"):
        if _OPEN not in template:
            raise ApiError(
                400,
                "This model's chat template has no form for tools that it may choose. Set tool_choice to 'required', "
                "to a named function, or to 'none'.",
                param="tool_choice",
                code="unsupported_tool_choice",
            )
        return ToolPlan(documents, reads_tags=True)
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(400, "response_format and a demanded tool exclude each other.", param="response_format")
    wanted = tools
    if isinstance(choice, NamedChoice):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is no tool.", param="tool_choice")
    return ToolPlan(documents, schema=call_schema(wanted))


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of `{"name": ..., "arguments": {...}}` for one of these tools; their definitions move to its root."""
    calls, definitions = [], dict[str, Any]()
    for number, tool in enumerate(tools):
        prefix = f"tool{number}_"
        parameters = dict(tool.function.parameters or {"type": "object"})
        for key in ("$defs", "definitions"):
            for name, definition in dict(parameters.pop(key, None) or {}).items():
                definitions[prefix + name] = _moved(definition, prefix)
        properties = {"name": {"const": tool.function.name}, "arguments": _moved(parameters, prefix)}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    more = {"$defs": definitions} if definitions else {}
    return {**schema, **more, "x-guidance": _COMPACT}


def _moved(schema: Any, prefix: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            name: _new_place(value, prefix) if name == "$ref" else _moved(value, prefix)
            for name, value in schema.items()
        }
    return [_moved(item, prefix) for item in schema] if isinstance(schema, list) else schema


def _new_place(reference: Any, prefix: str) -> Any:
    for root in ("#/$defs/", "#/definitions/"):
        if isinstance(reference, str) and reference.startswith(root):
            return f"#/$defs/{prefix}{reference.removeprefix(root)}"
    return reference


def _check(tools: Sequence[Tool], limits: Limits) -> None:
    if len(tools) > limits.tools:
        raise ApiError(400, f"tools: at most {limits.tools} are taken.", param="tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name.", param="tools")
    for number, tool in enumerate(tools):
        check_schema(tool.function.parameters, limits, f"tools.{number}.function.parameters")


def _call_of(text: str) -> Call | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{uuid4().hex[:24]}", document["name"], written)


def _begins(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`.

    >>> _begins("so <tool", "<tool_call>"), _begins("so", "<tool_call>")
    (5, 0)
    """
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
