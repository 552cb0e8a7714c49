"""The official Python client against the server, with its strict validation of every answer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.server.answers import tools
from mirrorsd.server.bundles.call_forms import Speech
from mirrorsd.server.settings import Limits

openai = pytest.importorskip("openai")
MESSAGES: list[Any] = [{"role": "user", "content": "Every morning the fox"}]
LONG = {"ignore_eos": True}
PLAN = tools.plan_tools
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "forest"]}, "is_old": {"type": "boolean"}},
    "required": ["place", "is_old"],
    "additionalProperties": False,
    **COMPACT,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]


def chat(client: Any, **settings: Any) -> Any:
    """A chat answer of the tiny model."""
    extra = {**LONG, **settings.pop("extra", {})}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "extra_body": extra, **settings}
    )


def test_models_are_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mirrorsd"
    with pytest.raises(openai.NotFoundError) as found:
        client.models.retrieve("other")
    assert found.value.code == "model_not_found"


def test_a_stream_adds_up_to_the_whole_answer(client: Any) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(c.choices[0].delta.role for c in chunks[1:] if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert all(c.usage is None for c in chunks[:-1])
    assert len({(c.id, c.created, c.system_fingerprint) for c in chunks}) == 1


def test_a_stream_ends_with_done(client: Any) -> None:
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=MESSAGES, max_tokens=4, stream=True
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"].startswith("req_")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith(("data: ", ": ping")) for line in lines)


def test_the_clients_own_accumulator_reads_the_stream(client: Any) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, max_tokens=200, logit_bias={"0": 100}, logprobs=True
    ) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion()
    assert found.choices[0].finish_reason == "stop"


def test_several_choices_open_in_order_and_differ(client: Any) -> None:
    chunks = list(chat(client, stream=True, n=3, temperature=1.5, seed=7))
    opened = [c.choices[0].index for c in chunks if c.choices and c.choices[0].delta.role]
    assert opened == [0, 1, 2]
    whole = chat(client, n=3, temperature=1.5, seed=7)
    texts = [choice.message.content for choice in whole.choices]
    for index in range(3):
        streamed = [c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(streamed) == texts[index]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 72


def test_a_seed_is_told_and_gives_the_same_text_again(client: Any) -> None:
    first = chat(client, temperature=1.3)
    again = chat(client, temperature=1.3, seed=first.mirror["seed"])
    other = chat(client, temperature=1.3, seed=first.mirror["seed"] + 1)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content
    assert chat(client, temperature=1.3, seed=-9007199254740991).mirror["seed"] == 2**64 - 9007199254740991


def test_every_method_gives_the_same_text_and_says_what_it_did(client: Any) -> None:
    answers = {m: chat(client, extra={"method": m}) for m in ("plain", "serial", "mirror", "auto")}
    assert len({answer.choices[0].message.content for answer in answers.values()}) == 1
    assert answers["plain"].timings["draft_n"] == 0
    assert answers["serial"].timings["draft_n"] >= answers["serial"].timings["draft_n_accepted"] > 0
    assert answers["mirror"].mirror["method"] == "mirror"
    assert answers["mirror"].timings["predicted_n"] == 24


def test_logprobs_come_with_their_bytes_and_are_those_of_plain_decoding(client: Any) -> None:
    found = {m: chat(client, logprobs=True, top_logprobs=3, extra={"method": m}) for m in ("plain", "mirror")}
    plain, mirror = (answer.choices[0].logprobs.content for answer in found.values())
    assert [entry.logprob for entry in plain] == [entry.logprob for entry in mirror]
    assert all(entry.logprob < 0 and len(entry.top_logprobs) == 3 for entry in mirror)
    text = b"".join(bytes(entry.bytes) for entry in mirror).decode("utf-8", "replace")
    assert text == found["mirror"].choices[0].message.content
    chunks = chat(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in plain]


def test_logprobs_of_a_dropped_stop_string_are_dropped_too(client: Any) -> None:
    whole = chat(client, logprobs=True).choices[0]
    stop = whole.message.content[8:10]
    cut = chat(client, logprobs=True, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert stop not in cut.message.content
    text = b"".join(bytes(entry.bytes) for entry in cut.logprobs.content).decode("utf-8", "replace")
    assert len(cut.logprobs.content) < len(whole.logprobs.content)
    assert text.startswith(cut.message.content)


def test_bias_and_penalties_reach_the_text(client: Any) -> None:
    usual = chat(client, logprobs=True)
    first = usual.choices[0].logprobs.content[0]
    token = client.post("/../tokenize", body={"content": first.token}, cast_to=dict[str, Any])["tokens"][0]
    banned = chat(client, logit_bias={str(token): -100})
    assert banned.choices[0].message.content != usual.choices[0].message.content
    penalised = chat(client, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=60)
    assert penalised.choices[0].message.content != chat(client, max_tokens=60).choices[0].message.content


def test_json_by_a_schema(client: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    settings: dict[str, Any] = {"extra": {"ignore_eos": False}, "max_tokens": 100, "response_format": wanted}
    answer = chat(client, **settings)
    document = json.loads(answer.choices[0].message.content)
    assert set(document) == {"place", "is_old"}
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in chat(client, stream=True, **settings) if c.choices)
    assert streamed == answer.choices[0].message.content


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=["required", "named"]
)
def test_a_demanded_tool_is_called(client: Any, choice: Any) -> None:
    settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 120}
    answer = chat(client, extra={"ignore_eos": False}, **settings).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    call = answer.message.tool_calls[0]
    assert call.function.name in ("weather", "time")
    assert choice == "required" or call.function.name == "time"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, **settings) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert found.message.tool_calls[0].function.arguments == call.function.arguments
    assert found.message.tool_calls[0].id != ""
    assert found.finish_reason == "tool_calls"


def calling(wish: tools.Wish, speech: Speech, limits: Limits, answer: Any = None) -> tools.ToolPlan:
    """A plan by which the text is words and then a call: the tiny model would not choose to call."""
    found = PLAN(tools.demanded(wish.tools, "time"), speech, limits, answer)
    assert found.grammar is not None
    return replace(found, grammar=found.grammar.replace("start: ", 'start: "I look.\\n" '))


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_are_free_where_nothing_is_demanded(client: Any, choice: str | None) -> None:
    """Whatever the template: the tiny model's takes no tools, so that our own form tells them."""
    settings: dict[str, Any] = {"tools": TOOLS, "max_tokens": 40, "extra": {"ignore_eos": False}}
    settings |= {"tool_choice": choice} if choice else {}
    answer = chat(client, **settings).choices[0]
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert answer.message.content or answer.message.tool_calls
    assert chat(client, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls is None


def test_a_tool_that_may_be_called_is_read_out_of_the_text(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "plan_tools", calling)
    settings: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "extra": {"ignore_eos": False}}
    answer = chat(client, **settings).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "I look."
    assert answer.message.tool_calls[0].function.name == "time"
    chunks = list(chat(client, stream=True, **settings))
    pieces = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert [bool(piece.id) for piece in pieces] == [True, False]
    assert pieces[1].function.arguments == answer.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_second_turn_shows_calls_and_results_to_a_template_without_tools(client: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    turns = [*MESSAGES, said, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    plain = chat(client, messages=[*MESSAGES, {"role": "user", "content": "rain"}])
    for given in ({}, {"tools": TOOLS[:1]}):
        answer = chat(client, messages=turns, extra={"ignore_eos": False}, **given)
        assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 10


def test_tools_in_responses(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    settings: dict[str, Any] = {"model": "tiny", "input": MESSAGES, "tools": told}
    answer = client.responses.create(tool_choice="required", **settings)
    call = answer.output[0]
    assert (len(answer.output), call.type, answer.status) == (1, "function_call", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    turns = [
        *MESSAGES,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    again = client.responses.create(**{**settings, "input": turns}, max_output_tokens=8)
    assert again.usage.input_tokens > answer.usage.input_tokens + 10
    monkeypatch.setattr(tools, "plan_tools", calling)
    with client.responses.stream(**settings) as stream:
        events = list(stream)
        found = stream.get_final_response()
    assert [item.type for item in found.output] == ["message", "function_call"]
    assert found.output_text == "I look."
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    given = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(given) == json.loads(found.output[1].arguments)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_completions_of_text_tokens_and_several_prompts(client: Any) -> None:
    def complete(prompt: Any, **settings: Any) -> Any:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=10, extra_body=LONG, **settings)

    one = complete("Once upon a time")
    ids = client.post("/../tokenize", body={"content": "Once upon a time"}, cast_to=dict[str, Any])["tokens"]
    assert complete(ids).choices[0].text == one.choices[0].text
    several = complete(["Once upon a time", "The old heron"], logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == one.choices[0].text
    assert len(several.choices[1].logprobs.token_logprobs) == 10
    lenient = openai.OpenAI(base_url=client.base_url, api_key="none")  # strictly, no chunk could lack its finish_reason
    given: dict[str, Any] = {"prompt": ["Once upon a time", "The old heron"], "max_tokens": 10, "extra_body": LONG}
    streamed = list(lenient.completions.create(model="tiny", stream=True, **given))
    lenient.close()
    texts = ["".join(c.choices[0].text for c in streamed if c.choices[0].index == index) for index in (0, 1)]
    assert texts == [choice.text for choice in several.choices]


def test_responses_in_text_and_json(client: Any) -> None:
    answer = client.responses.create(model="tiny", input="Every morning the fox", max_output_tokens=12)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == chat(client, max_tokens=12, extra={"ignore_eos": False}).choices[0].message.content
    form = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    with client.responses.stream(model="tiny", input=MESSAGES, text=form) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    assert found.status == "completed"
    assert json.loads(found.output_text)["place"] in ("river", "forest")
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_responses_need_a_model_and_have_every_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.post("/responses", body={"input": "x"}, cast_to=object)
    assert found.value.param == "model"
    answer = client.responses.create(model="tiny", input="Every morning", max_output_tokens=4)
    needed = "completed_at instructions metadata reasoning service_tier store text tool_choice tools top_logprobs usage"
    assert set(needed.split()) <= answer.model_fields_set | set(answer.model_extra or {})


def test_a_second_turn_finds_the_first_in_the_cache(client: Any) -> None:
    first = chat(client, max_tokens=8)
    text = first.choices[0].message.content
    more = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    second = chat(client, messages=more, max_tokens=8)
    fresh = chat(client, messages=more, max_tokens=8, extra={"cache_prompt": False})
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert fresh.choices[0].message.content == second.choices[0].message.content


def test_a_prediction_changes_nothing_but_the_speed(client: Any) -> None:
    plain = chat(client, max_tokens=40)
    text = plain.choices[0].message.content
    again = chat(client, max_tokens=40, prediction={"type": "content", "content": text})
    assert again.choices[0].message.content == text
    assert again.usage.completion_tokens_details.accepted_prediction_tokens >= 0


def test_chunks_say_where_text_came_from_and_what_the_devices_did(client: Any) -> None:
    extra = {"mirror_tokens": True, "mirror_timeline": True, "method": "mirror"}
    chunks = [c for c in chat(client, stream=True, extra=extra, max_tokens=30) if c.choices]
    for chunk in chunks:
        pieces = chunk.model_extra.get("mirror_tokens", [])
        assert "".join(text for text, _ in pieces) == (chunk.choices[0].delta.content or "")
        assert {source for _, source in pieces} <= {"window", "lookup", "correction", "plain"}
    spans = [span for chunk in chunks for span in chunk.model_extra.get("mirror_timeline", [])]
    assert {span[0] for span in spans} == {"target", "draft", "host"}
    assert all(start <= end for _, _, start, end in spans)
    assert chunks[-1].model_extra["mirror"]["steps"] > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a temperature below zero": ({"temperature": -1}, "temperature"),
    "a number as text": ({"temperature": "0.5"}, "temperature"),
    "too many choices": ({"n": 9}, "n"),
    "no choices": ({"n": 0}, "n"),
    "too many stops": ({"stop": ["x"] * 17}, "stop"),
    "a long stop": ({"stop": ["x" * 257]}, "stop"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "a bias that is too strong": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "an empty conversation": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    "functions of old": ({"functions": [{"name": "f"}]}, "functions"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities"),
    "a tool that is not there": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
    ),
    "a bias of no token": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "a schema that cannot be kept": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        "response_format",
    ),
    "an expression that is none": ({"guided_regex": "("}, "guided_regex"),
    "a head that the bundle lacks": ({"method": "medusa"}, "method"),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format"),
}


@pytest.mark.parametrize("settings, param", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_is_refused_by_name(client: Any, settings: dict[str, Any], param: str) -> None:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **settings}
    with pytest.raises(openai.BadRequestError) as found:
        client.post("/chat/completions", body=given, cast_to=object)
    assert found.value.param == param
    assert found.value.type == "invalid_request_error"
    assert found.value.request_id


@pytest.mark.parametrize("times", [600, 3000])
def test_a_prompt_that_is_too_long_has_its_code(client: Any, times: int) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        chat(client, messages=[{"role": "user", "content": "fox " * times}])
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "messages")


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: tiny"):
        chat(client, model="other")


def test_what_changes_nothing_is_ignored(client: Any) -> None:
    same: Callable[..., Any] = chat
    settings = {"store": False, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto"}
    assert same(client, **settings).choices[0].message.content == chat(client).choices[0].message.content


async def _asked(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "extra_body": LONG}
        stream = await client.chat.completions.create(**asked, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


def test_the_async_client_reads_the_same(client: Any, serving: Running) -> None:
    assert asyncio.run(_asked(serving.url)) == chat(client).choices[0].message.content
