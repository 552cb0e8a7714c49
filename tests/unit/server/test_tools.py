"""Calls read out of text that comes in pieces of any size, and the schema of a demanded call."""

import json
from typing import Any

import pytest

from mirrorsd.server.answers.tools import DemandedCall, Reader, TaggedCalls, call_schema, plan_tools
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import ChatRequest, Tool

TEXT = (
    'I look.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call> so'
)


def read_all(reader: Reader, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    found, calls = "", []
    for read in [*(reader.push(text[at : at + size]) for at in range(0, len(text), size)), reader.finish()]:
        found += read.text
        calls += [(call.name, json.loads(call.arguments)) for call in read.calls]
    return found, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 500])
def test_calls_are_found_wherever_the_text_is_cut(size: int) -> None:
    assert read_all(TaggedCalls(), TEXT, size) == ("I look. so", [("a", {"x": 1}), ("b", {})])


@pytest.mark.parametrize("text", ["a < b", "<tool", "<tool_call>{broken</tool_call>!", "<tool_call>{", "</tool_call>"])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    assert read_all(TaggedCalls(), text, size) == (text, [])


def test_a_last_call_may_lack_its_mark() -> None:
    assert read_all(TaggedCalls(), '<tool_call>{"name": "a"}', 3) == ("", [("a", {})])


def test_a_demanded_call_that_was_cut_short_is_text() -> None:
    assert read_all(DemandedCall(), '{"name": "a", "argu', 5) == ('{"name": "a", "argu', [])
    assert read_all(DemandedCall(), '{"name": "a", "arguments": {}}', 5) == ("", [("a", {})])


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_definitions_of_several_tools_do_not_meet() -> None:
    parameters = {"type": "object", "properties": {"c": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"enum": ["x"]}}}
    schema = call_schema([tool("a", parameters), tool("b", parameters), tool("c")])
    assert set(schema["$defs"]) == {"tool0_c", "tool1_c"}
    places = [call["properties"]["arguments"].get("properties", {}).get("c") for call in schema["anyOf"]]
    assert places == [{"$ref": "#/$defs/tool0_c"}, {"$ref": "#/$defs/tool1_c"}, None]


@pytest.mark.parametrize("choice", ["auto", None])
def test_a_free_choice_needs_a_form_of_the_family(choice: str | None) -> None:
    given = {"messages": [{"role": "user", "content": "x"}], "tools": [tool("a").model_dump()], "tool_choice": choice}
    body = ChatRequest.model_validate(given)
    with pytest.raises(ApiError, match="no form for tools"):
        plan_tools(body, "a template", Limits())
    assert plan_tools(body, "with <tool_call>", Limits()).reads_tags
