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
        (RESPONSES, {"tools": [{"name": "look"}]}, "tools.0.type", "required"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "store: false"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "at least one"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "at least one"),
        (CHAT, {"max_completion_tokens": -2}, "max_completion_tokens", "-1"),
        (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity", "medium"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        (RESPONSES, {"reasoning": {"effort": "very"}}, "reasoning_effort", "does not read"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "search"),
        (RESPONSES, {"model": None}, "model", "valid string"),
        (CHAT, {"tool_choice": "some"}, "tool_choice", "auto"),
        (CHAT, {"tool_choice": {"type": "function", "name": "look"}}, "tool_choice.function", "required"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, None, "schema"),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs", "valid"),
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


def test_a_refusal_beside_no_content_is_text(serving: Running) -> None:
    as_text = ask(serving, CHAT, messages=[USER, {"role": "assistant", "content": "the old heron"}, USER])[1]
    refused = {"role": "assistant", "content": None, "refusal": "the old heron"}
    status, as_field = ask(serving, CHAT, messages=[USER, refused, USER])
    assert (status, as_field["usage"]["prompt_tokens"]) == (200, as_text["usage"]["prompt_tokens"])


@pytest.mark.parametrize("foreign", [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"a": 1}}])
def test_tools_that_no_model_is_told_of_are_named(serving: Running, foreign: dict[str, Any]) -> None:
    """Agents declare such tools beside their own in every request."""
    body = {"model": "tiny", "input": "fox", "max_output_tokens": 60, "tools": [foreign, FLAT[0]]}
    body["tool_choice"] = {"type": "function", "name": "look"}
    answer = raw(serving, post(serving, RESPONSES, json.dumps(body).encode()))
    head, _, document = answer.partition(b"\r\n\r\n")
    assert status_of(answer) == 200
    assert f"x-mirrorsd-unknown-fields: tools.0.{foreign['type']}".encode() in head
    assert [item["name"] for item in json.loads(document)["output"]] == ["look"]
    assert [tool["name"] for tool in json.loads(document)["tools"]] == ["look"]


def test_minus_one_is_what_the_server_takes_by_itself(serving: Running) -> None:
    """The senders of -1 mean a seed that is drawn, all tokens, and as many as fit."""
    drawn = {ask(serving, CHAT, seed=-1, temperature=1, max_tokens=2)[1]["mirror"]["seed"] for _ in range(3)}
    assert len(drawn) == 3
    for more in ({"top_k": -1}, {"top_k": 0}):
        assert (
            ask(serving, CHAT, seed=7, temperature=1, **more)[1]["choices"]
            == (ask(serving, CHAT, seed=7, temperature=1)[1]["choices"])
        )
    whole = ask(serving, CHAT, max_tokens=None)[1]["choices"]
    for name in ("max_tokens", "n_predict", "max_completion_tokens"):
        assert ask(serving, CHAT, **{"max_tokens": None, name: -1})[1]["choices"] == whole
    plain = raw(serving, post(serving, "/v1/completions", b'{"model": "tiny", "prompt": "fox", "seed": -1}'))
    assert json.loads(plain.split(b"\r\n\r\n", 1)[1])["mirror"]["seed"] is None


def test_no_mass_beside_the_best_token_is_the_greedy_text(serving: Running) -> None:
    greedy = ask(serving, CHAT, temperature=0)[1]["choices"]
    for method in ("plain", "mirror", "lookup"):
        assert ask(serving, CHAT, top_p=0, seed=5, temperature=1.5, method=method)[1]["choices"] == greedy


def test_a_history_of_functions_and_other_tools_is_read(serving: Running) -> None:
    told = [USER, {"role": "function", "name": "look", "content": "wet"}, USER]
    assert ask(serving, CHAT, messages=told)[0] == 200
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    items = [USER, custom, output, {"type": "web_search_call", "id": "w", "status": "completed"}, USER]
    assert ask(serving, RESPONSES, input=items)[0] == 200


def test_as_many_prompts_as_a_client_sends_at_once(serving: Running) -> None:
    body = {"model": "tiny", "prompt": ["fox"] * 20, "max_tokens": 1}
    answer = raw(serving, post(serving, "/v1/completions", json.dumps(body).encode()))
    assert len(json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]) == 20


def test_what_several_prompts_took_is_told_once_and_of_all(serving: Running) -> None:
    body = {"model": "tiny", "prompt": ["fox", "The old heron"], "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": True}
    whole = json.loads(
        raw(serving, post(serving, "/v1/completions", json.dumps(body).encode())).split(b"\r\n\r\n", 1)[1]
    )
    streamed = raw(serving, post(serving, "/v1/completions", json.dumps(body | {"stream": True}).encode()))
    events = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith('data: {"id"')]
    told = [event for event in events if "timings" in event]
    assert told == events[-1:]
    for answer in (whole, *told):
        assert answer["timings"]["predicted_n"] == 2 * 2 * 3 and len(answer["mirror"]["seeds"]) == 4


def test_the_tool_is_named_whose_schema_cannot_be_taken(serving: Running) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "other", "parameters": bad, "strict": True}}]
    status, document = ask(serving, CHAT, tools=tools)
    assert (status, document["error"]["param"]) == (400, "tools")
    assert '"other"' in document["error"]["message"] and "uniqueItems" in document["error"]["message"]
    tools[1]["function"]["parameters"] = {**bad, "properties": {"a": False}}
    status, document = ask(serving, CHAT, tools=tools, response_format={"type": "text"})
    assert (status, document["error"]["param"]) == (400, "tools")
    assert 'the parameters of "other" cannot be taken: no value' in document["error"]["message"]


def test_words_that_cannot_be_followed_are_named_and_refuse_no_message(serving: Running) -> None:
    """One tool of a dozen has such a word, and the messages are about something else."""
    some = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "not": {"const": []}}
    schema = {"type": "object", "properties": {"a": some, "b": {"pattern": "("}}, "required": None}
    for path, tool in (
        (CHAT, {"type": "function", "function": {"name": "look", "parameters": schema}}),
        (RESPONSES, {"type": "function", "name": "look", "parameters": schema}),
    ):
        asked = {"messages": [USER], "max_tokens": 9} if path == CHAT else {"input": "fox", "max_output_tokens": 9}
        body = json.dumps({"model": "tiny", "tools": [tool], **asked}).encode()
        answer = raw(serving, post(serving, path, body))
        assert status_of(answer) == 200
        words = (f"tools.0.{word}".encode() for word in ("uniqueItems", "not", "pattern"))
        assert all(word in answer.partition(b"\r\n\r\n")[0] for word in words)


def test_schemas_as_libraries_write_them_are_taken(serving: Running) -> None:
    """zod's records say that keys are strings, and its addresses have a pattern that looks ahead."""
    address = {"type": "string", "format": "email", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z]+@[a-z]+$"}
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}
    schema = {"type": "object", "properties": {"to": address, "more": record}, "required": ["to"]}
    tool: dict[str, Any] = {"name": "send", "parameters": schema}
    status, _ = ask(serving, CHAT, tools=[{"type": "function", "function": tool}])
    assert status == 200
    status, document = ask(serving, CHAT, tools=[{"type": "function", "function": {**tool, "strict": True}}])
    assert status == 400 and '"send"' in document["error"]["message"]
