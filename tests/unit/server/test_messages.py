"""What a request's messages and items become before a chat template sees them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from mirrorsd.server.answers.chat import template_messages
from mirrorsd.server.answers.logprobs import completion_logprobs
from mirrorsd.server.answers.responses import _messages
from mirrorsd.server.bundles.loaded import LoadedBundle
from mirrorsd.server.wire.chat import ChatRequest
from mirrorsd.server.wire.known_fields import unknown_fields
from mirrorsd.server.wire.responses import ResponseRequest


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


def read(*items: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    messages = _messages(ResponseRequest.model_validate({"model": "m", "input": list(items)}))
    return [(message["role"], message["content"], message.get("reasoning_content")) for message in messages]


def test_thoughts_belong_to_what_follows_them() -> None:
    assert read(said("assistant", "one"), thought("T"), said("assistant", "two")) == [
        ("assistant", "one", None),
        ("assistant", "two", "T"),
    ]
    assert read(thought("A"), said("assistant", "one"), thought("B"), CALL) == [("assistant", "one", "AB")]
    assert read(thought("A"), thought("B"), CALL) == [("assistant", "", "AB")]
    assert read(thought("A"), said("user", "go on"), said("assistant", "one")) == [
        ("user", "go on", None),
        ("assistant", "one", None),
    ]


def test_system_messages_at_the_beginning_become_one() -> None:
    """Codex sends instructions and permissions, and many templates take or write only one of them."""
    parts = [{"type": "text", "text": "B"}]
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": parts}, said("user", "x")]
    later = {"role": "system", "content": "C"}
    asked = ChatRequest.model_validate({"messages": [*messages, later]})
    found = [(message["role"], message["content"]) for message in template_messages(asked.messages)]
    assert found == [("system", "A\n\nB"), ("user", "x"), ("system", "C")]
    alone = ChatRequest.model_validate({"messages": messages[1:]})
    assert template_messages(alone.messages)[0] == {"role": "system", "content": parts}


def test_the_chosen_token_is_among_the_best_in_completions() -> None:
    tokenizer = SimpleNamespace(token_bytes=lambda token: b"abc"[token : token + 1])
    bundle = cast(LoadedBundle, SimpleNamespace(tokenizer=tokenizer))

    def placed(token: int, *top: tuple[int, float]) -> Any:
        logprob = SimpleNamespace(value=-3.0, top=top)
        return SimpleNamespace(token=SimpleNamespace(id=token, logprob=logprob), offset=0)

    found = completion_logprobs(bundle, [placed(2, (0, -1.0), (1, -2.0)), placed(0, (0, -3.0), (1, -4.0)), placed(1)])
    assert found["top_logprobs"] == [{"c": -3.0, "a": -1.0, "b": -2.0}, {"a": -3.0, "b": -4.0}, {"b": -3.0}]


def test_a_functions_message_is_a_tools_result() -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "function", "name": "look", "content": "wet"}]})
    assert template_messages(body.messages) == [{"role": "tool", "name": "look", "content": "wet"}]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_a_chat_are_text_by_their_names_in_responses_too(kind: str) -> None:
    part = {"type": kind, "text": "fox"} | ({"annotations": []} if kind == "output_text" else {})
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": [part]}]})
    assert template_messages(body.messages) == [{"role": "user", "content": [{"type": "text", "text": "fox"}]}]


def test_calls_of_other_tools_in_a_history_are_calls_or_left_out() -> None:
    custom = {"type": "custom_tool_call", "id": "x", "call_id": "c", "name": "patch", "input": "a \u00e9"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}
    listed = {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}
    items = [said("user", "one"), custom, output, search, thought("T"), listed, said("assistant", "two")]
    body = ResponseRequest.model_validate({"model": "m", "input": items})
    messages = _messages(body)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert (call["id"], call["function"]) == ("c", {"name": "patch", "arguments": '{"input": "a \u00e9"}'})
    assert (messages[2]["content"], messages[3]["reasoning_content"]) == ("done", "T")
    assert unknown_fields(body) == ["input.3.web_search_call", "input.5.mcp_list_tools"]


@pytest.mark.parametrize("kind", ["banana", "item_reference", "custom_tool_call"])
def test_other_items_are_refused(kind: str) -> None:
    with pytest.raises(ValidationError):
        ResponseRequest.model_validate({"model": "m", "input": [{"type": kind, "id": "x"}]})
