"""What clients write in several ways is taken in each; what is wrong is told with its place and nothing else."""

import json
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import post, raw, status_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "fox"}
NAMES = ["look", "mcp:sky/look.up", "n" * 90]
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
FLAT = [{"type": "function", "name": name} for name in NAMES]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}


def ask(running: Running, path: str, **more: Any) -> tuple[int, Any]:
    begun = {"messages": [USER], "max_tokens": 160} if path == CHAT else {"input": "fox", "max_output_tokens": 160}
    answer = raw(running, post(running, path, json.dumps({"model": "tiny", **begun, **more}).encode()))
    return status_of(answer), json.loads(answer.split(b"\r\n\r\n", 1)[1])


@pytest.mark.parametrize(
    "path, more, param, word",
    [
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content", "text only"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content",
            "text only",
        ),
        (RESPONSES, {"input": [{"content": "x"}]}, "input.0", "needs role"),
        (RESPONSES, {"input": 5}, "input", "valid string"),
        (RESPONSES, {"input": []}, "input", "at least 1"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning_effort", "does not read"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "search"),
        (RESPONSES, {"model": None}, "model", "valid string"),
        (CHAT, {"tool_choice": "some"}, "tool_choice", "auto"),
        (CHAT, {"tool_choice": {"type": "function", "name": "look"}}, "tool_choice.function", "required"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, None, "schema"),
        (CHAT, {"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a", "valid"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    serving: Running, path: str, more: dict[str, Any], param: str | None, word: str
) -> None:
    status, document = ask(serving, path, **more)
    error = document["error"]
    assert status == 400
    assert error["param"] == (param or "response_format.json_schema.schema")
    assert word in error["message"]
    assert error["message"].startswith(error["param"])
    assert not any(mark in error["message"] for mark in ("Value error", "list[", "literal[", "problems"))


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"stream_options": {"include_obfuscation": False}},
        {"text": {"verbosity": "medium"}},
        {"include": ["reasoning.encrypted_content"]},
    ],
)
def test_what_changes_no_response_is_taken(serving: Running, more: dict[str, Any]) -> None:
    assert ask(serving, RESPONSES, max_output_tokens=1, **more)[0] == 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_tool_is_demanded_in_each_way(serving: Running, path: str, name: str, is_allowed: bool) -> None:
    """A schema of the answer changes nothing: it holds for answers that are no call."""
    one = {"type": "function", "function": {"name": name}} if path == CHAT else {"type": "function", "name": name}
    if path == CHAT:
        frame = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
        _, document = ask(serving, path, tools=TOOLS, tool_choice=frame if is_allowed else one, **form)
        (call,) = (call["function"] for call in document["choices"][0]["message"]["tool_calls"])
    else:
        frame = {"type": "allowed_tools", "mode": "required", "tools": [one]}
        form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
        _, document = ask(serving, path, tools=FLAT, tool_choice=frame if is_allowed else one, **form)
        assert document["tool_choice"] == (frame if is_allowed else one)
        (call,) = document["output"]
    assert (call["name"], call["arguments"]) == (name, "{}")


def test_tools_that_are_not_there_cannot_be_allowed(serving: Running) -> None:
    one = {"type": "function", "function": {"name": "other"}}
    frame = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
    status, document = ask(serving, CHAT, tools=TOOLS, tool_choice=frame)
    assert (status, document["error"]["param"]) == (400, "tool_choice")


def test_a_refusal_in_a_history_is_text(serving: Running) -> None:
    said = [{"type": "refusal", "refusal": "the old heron"}]
    as_text = ask(serving, CHAT, messages=[USER, {"role": "assistant", "content": "the old heron"}, USER])[1]
    as_part = ask(serving, CHAT, messages=[USER, {"role": "assistant", "content": said}, USER])[1]
    items = ask(serving, RESPONSES, input=[USER, {"role": "assistant", "content": said}, USER])[1]
    assert as_part["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"] == items["usage"]["input_tokens"]
