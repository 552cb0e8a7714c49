"""What is read of a request is bounded, and what is wrong with it is told in a few words."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mirrorsd.runtime import CancelToken
from mirrorsd.server.answers.settings_of import check_schema
from mirrorsd.server.answers.tools import Wish, check_wish
from mirrorsd.server.app import ENDPOINTS
from mirrorsd.server.bundles.loaded import LoadedBundle, Task, _waited
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits, ServerSettings
from mirrorsd.server.wire.chat import ChatRequest, Tool
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.responses import ResponseRequest
from mirrorsd.texts.config import GenerationConfig

USER = {"role": "user", "content": "x"}
MODELS = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]


def collections(schema: Any) -> list[dict[str, Any]]:
    found, open_ones = [], [schema]
    while open_ones:
        part = open_ones.pop()
        if isinstance(part, dict):
            found += [part] if part.get("type") in ("list", "dict") else []
            open_ones += part.values()
        elif isinstance(part, list | tuple):
            open_ones += part
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_list_is_checked_up_to_its_first_error(model: type[BaseModel]) -> None:
    found = collections(model.__pydantic_core_schema__)
    assert all(part.get("fail_fast") for part in found)


@pytest.mark.parametrize(
    "model, body",
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": ["a"] * 1000}),
        (CompletionRequest, {"prompt": [[1]] * 1000}),
        (CompletionRequest, {"prompt": [1, *["a"] * 1000]}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [USER] * 3000}),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {str(n): "x" for n in range(999)}},
        ),
    ],
)
def test_a_thousand_errors_are_one(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() <= 2


@pytest.mark.parametrize("prompt", ["fox", ["fox", "heron"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_every_form_are_taken(prompt: Any) -> None:
    assert CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompt == prompt


@pytest.mark.parametrize("prompt", [None, [], 5, [None], [1, "a"], ["a", 1], [[1], "a"], [["a"]], [True], {}])
def test_other_prompts_are_not(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": prompt})


def test_messages_of_errors_are_short() -> None:
    error = ApiError(400, "beginning " + "x" * 100_000 + " end")
    assert len(error.body["error"]["message"]) <= 600
    assert error.message.startswith("beginning ")
    assert error.message.endswith(" end")


def test_a_body_is_bounded_by_the_context_and_never_above_what_is_set() -> None:
    limits = Limits()
    assert limits.body_bytes_for(2048) == 6 * (16 * 2048 + limits.schema_bytes) < limits.body_bytes
    assert limits.body_bytes_for(1 << 20) == limits.body_bytes


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"$defs": {"type": "string"}, "properties": {"type": "string"}, "multipleOf": {}}},
        {"const": {"$defs": [1]}},
        {"enum": [{"properties": 5}]},
        {"type": "object", "properties": {"a": True}, "$defs": {"b": {"default": {"definitions": 1}}}},
        {"type": "integer", "multipleOf": 1000},
        None,
    ],
    ids=str,
)
def test_names_and_constants_in_a_schema_are_no_keywords(schema: Any) -> None:
    check_schema(schema, Limits(), "schema")


@pytest.mark.parametrize(("waited", "left"), [(0.0, 5.0), (2.0, 3.0)])
def test_what_has_waited_has_so_much_less_time(waited: float, left: float) -> None:
    """For a seat, and for a beginning that another conversation reads."""
    assert _waited(GenerationConfig(deadline_s=5), waited).deadline_s == left
    assert _waited(GenerationConfig(), waited).deadline_s is None


class Seats:
    """Of a bundle: one comes free, or none in time."""

    def __init__(self, *, has_one: bool) -> None:
        self._has_one = has_one

    @contextmanager
    def take(self, *_: object) -> Iterator[object]:
        if not self._has_one:
            raise TimeoutError("All seats are taken.")
        yield SimpleNamespace(stream=lambda **_: pytest.fail("a text was begun"))


class Silent:
    """What waits for a thread, and nothing comes."""

    async def items(self, _: float) -> AsyncIterator[None]:
        yield None


@pytest.mark.parametrize("has_one", [True, False])
def test_who_has_waited_all_of_his_time_is_told_so(has_one: bool) -> None:
    """And gets no text of one step: by the thread that would write it, or before, while there is none for him."""
    task = Task(token_ids=[1], configs=[GenerationConfig(deadline_s=5)], cancel=CancelToken())
    bundle: Any = SimpleNamespace(_settings=ServerSettings(limits=Limits(request_s=5)), _seats=Seats(has_one=has_one))
    with pytest.raises(ApiError) as told:
        next(LoadedBundle._answer(bundle, task, time.perf_counter() - 6))
    assert told.value.status == 503 and told.value.headers["Retry-After"]

    async def wait() -> None:
        waiting: Any = Silent()
        bundle._running = set()
        await anext(LoadedBundle._counted(bundle, waiting, task, time.perf_counter() - 6))

    with pytest.raises(ApiError, match="No seat came free"):
        asyncio.run(wait())


def test_as_many_tools_as_openai_takes_are_taken() -> None:
    tools = [Tool.model_validate({"type": "function", "function": {"name": f"f{number}"}}) for number in range(129)]
    check_wish(Wish(tools[:128]), Limits())
    with pytest.raises(ApiError, match="at most 128"):
        check_wish(Wish(tools), Limits())


REQUESTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [USER]}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponseRequest, {"model": "m", "input": "x"}),
]


@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "n", "top_logprobs", "max_completion_tokens"])
def test_a_whole_number_may_have_a_point_and_no_other_value_is_one(name: str) -> None:
    found = getattr(ChatRequest.model_validate({"messages": [USER], name: 3.0}), name)
    assert found == 3 and type(found) is int
    for wrong in (3.5, True, "3", float("inf"), [3]):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate({"messages": [USER], name: wrong})


def test_bounds_of_numbers_hold_for_those_with_a_point() -> None:
    for more in ({"n": 0.0}, {"top_logprobs": 21.0}, {"top_k": -2.0}, {"max_tokens": 0.0}):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate({"messages": [USER], **more})


@pytest.mark.parametrize("model, body", REQUESTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_null_stands_for_a_default(model: type[BaseModel], body: dict[str, Any]) -> None:
    fields = {field.alias or name: field for name, field in model.model_fields.items() if name not in body}
    assert model.model_validate({**body, **dict.fromkeys(fields)}) == model.model_validate(body)


def test_a_null_stands_for_a_default_within_a_field_too_but_not_for_what_is_needed() -> None:
    call = {"id": "c", "type": None, "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    options = {"include_usage": None, "include_obfuscation": None}
    found = ChatRequest.model_validate({"messages": [message], "stream_options": options})
    assert found.messages[0].tool_calls is not None and found.messages[0].tool_calls[0].type == "function"
    assert not found.wants_usage
    for wrong in ({"messages": None}, {"messages": [{"role": None, "content": "x"}]}):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate(wrong)
