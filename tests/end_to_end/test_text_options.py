"""What a caller may ask of a text: every method gives the same, greedy and sampled, and it is what was asked for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd import ConfigError, GenerationError, GenerationResult, MirrorPipeline
from mirrorsd.runtime import GeneratedToken
from mirrorsd.runtime.sampling.noise import nth_seed
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.runtime.turns import Turns

METHODS = ("plain", "serial", "mirror", "auto")
PROMPT = "Every morning the fox"
WAYS = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11})
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as loaded:
        yield loaded


def by_every_method(pipe: MirrorPipeline, **settings: Any) -> GenerationResult:
    """The plain answer, once all methods have given the same tokens, text, end and log-probabilities."""
    results = [pipe.generate(PROMPT, method=method, **{"max_new_tokens": 40, **settings}) for method in METHODS]
    for result in results[1:]:
        assert result.token_ids == results[0].token_ids, result.method
        assert (result.text, result.stop_reason) == (results[0].text, results[0].stop_reason)
        assert result.logprobs == results[0].logprobs
    return results[0]


def drafted_tokens(pipe: MirrorPipeline, **settings: Any) -> list[GeneratedToken]:
    chunks = pipe.stream(PROMPT, max_new_tokens=40, ignore_eos=True, method="mirror", **settings)
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
def test_log_probabilities_change_no_token_and_are_the_same_by_every_method(
    pipe: MirrorPipeline, way: dict[str, Any]
) -> None:
    without = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, method="plain", **way)
    result = by_every_method(pipe, logprobs=True, top_logprobs=5, ignore_eos=True, **way)
    assert result.token_ids == without.token_ids
    assert any(token.source == "window" for token in drafted_tokens(pipe, logprobs=True, **way))
    assert without.logprobs == ()
    assert len(result.logprobs) == result.num_tokens
    for token, found in zip(result.token_ids, result.logprobs, strict=True):
        values = [value for _, value in found.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert dict(found.top).get(token, found.value) == found.value <= 0
        if way["temperature"] == 0.0:
            assert found.top[0] == (token, found.value)


def test_log_probabilities_are_the_target_s_own(pipe: MirrorPipeline) -> None:
    """All of a small vocabulary's: they are a distribution, and what a penalty does to the choice is not in them."""
    options = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "max_new_tokens": 1, "temperature": 0.0}
    free = pipe.generate(PROMPT, **options)
    banned = pipe.generate(PROMPT, logit_bias={free.token_ids[0]: -100}, **options)
    assert banned.token_ids[0] == free.logprobs[0].top[1][0]
    assert banned.logprobs[0].top == free.logprobs[0].top
    assert 0 < sum(np.exp([value for _, value in free.logprobs[0].top])) <= 1 + 1e-6


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.1},
        {"presence_penalty": -1.0, "logit_bias": {40: 5, 41: -100}},
    ],
    ids=["presence", "frequency", "bias"],
)
def test_penalties_and_biases_give_one_text_by_every_method(
    pipe: MirrorPipeline, way: dict[str, Any], options: dict[str, Any]
) -> None:
    result = by_every_method(pipe, ignore_eos=True, **options, **way)
    assert result.token_ids != pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, **way).token_ids


def test_a_bias_forbids_and_forces_tokens(pipe: MirrorPipeline) -> None:
    result = pipe.generate(PROMPT, max_new_tokens=5, ignore_eos=True, logit_bias={"65": 100})
    assert result.token_ids == [65] * 5
    assert 65 not in pipe.generate(PROMPT, max_new_tokens=5, ignore_eos=True, logit_bias={65: -100}).token_ids


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_schema_gives_one_json_text_by_every_method(
    pipe: MirrorPipeline, way: dict[str, Any], logprobs: bool
) -> None:
    result = by_every_method(pipe, json_schema=SCHEMA, max_new_tokens=80, logprobs=logprobs, **way)
    found = json.loads(result.text)
    assert result.stop_reason == "eos"
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 99
    assert len(found["name"]) <= 6


def test_what_a_form_leaves_no_choice_of_is_a_window(pipe: MirrorPipeline) -> None:
    plain = pipe.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=80, method="plain")
    for method in ("serial", "mirror"):
        result = pipe.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=80, method=method)
        forced = [pair for pair in zip(result.steps, result.steps[1:], strict=False) if pair[0].next_source == "forced"]
        assert sum(after.num_accepted for _, after in forced) >= 4
        assert result.stats.steps < plain.stats.steps


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled"])
def test_expressions_and_grammars_give_one_text_by_every_method(pipe: MirrorPipeline, way: dict[str, Any]) -> None:
    text = by_every_method(pipe, regex=r"(red|green|blue)( (red|green|blue)){3,6}", **way).text
    assert re.fullmatch(r"(red|green|blue)( (red|green|blue)){3,6}", text)
    grammar = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,3}/'
    result = by_every_method(pipe, grammar=grammar, presence_penalty=0.5, max_new_tokens=200, **way)
    assert result.stop_reason == "length" or re.fullmatch(r"<[a-z]{1,3}(,[a-z]{1,3})*>", result.text)


def test_a_constraint_that_cannot_be_taken_is_refused_before_anything_runs(pipe: MirrorPipeline) -> None:
    for settings in ({"regex": "(["}, {"grammar": "start: missing"}, {"json_schema": {"type": "nonsense"}}):
        with pytest.raises(ConfigError, match=f"GenerationConfig.{next(iter(settings))} cannot be taken"):
            pipe.stream(PROMPT, **settings)


def test_several_answers_are_those_of_their_seeds(pipe: MirrorPipeline) -> None:
    options = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    answers = pipe.generate_several(3, PROMPT, seed=5, **options)
    assert [answer.seed for answer in answers] == [nth_seed(5, number) for number in range(3)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    alone = pipe.generate(PROMPT, seed=nth_seed(5, 2), **options)
    assert alone.token_ids == answers[2].token_ids
    assert answers[2].stats.num_reused_tokens == answers[2].stats.num_prompt_tokens - 1
    with pytest.raises(ConfigError, match=r"generate_several.count is 0; allowed: 1 to 128"):
        pipe.generate_several(0, PROMPT)


def test_several_answers_wait_for_nobody_elses_text(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that writes another thread's text is left alone: what it has read is not waited for."""
    with pipe.session() as session:
        pipe.engine.open_company(2)
        pipe.engine.preparing_worker.run(lambda: None)
        session.generate_several(2, PROMPT, max_new_tokens=2)
        (other,) = session._others
        monkeypatch.setattr(Turns, "is_taken", property(lambda turns: turns is other._turns))
        monkeypatch.setattr(MirrorSession, "follow", lambda *_: pytest.fail("it waits"))
        answers = session.generate_several(2, PROMPT, max_new_tokens=2)
    assert answers[0].token_ids == answers[1].token_ids


def test_special_tokens_show_and_stop_where_they_are_asked_for(pipe: MirrorPipeline) -> None:
    user = pipe.tokenizer.encode("<|user|>")[0]
    options = {"max_new_tokens": 4, "ignore_eos": True, "logit_bias": {user: 100}}
    assert pipe.generate(PROMPT, **options).text == ""
    assert pipe.generate(PROMPT, skip_special_tokens=False, **options).text == "<|user|>" * 4
    stopped = pipe.generate(PROMPT, skip_special_tokens=False, stop_strings="<|user|><|user|>", **options)
    assert (stopped.text, stopped.stop_reason, stopped.num_tokens) == ("", "stop_string", 2)


def test_the_bytes_of_tokens_are_the_text_s(pipe: MirrorPipeline) -> None:
    result = pipe.generate(PROMPT, max_new_tokens=60, ignore_eos=True, temperature=1.5, seed=3)
    said = b"".join(pipe.tokenizer.token_bytes(token) for token in result.token_ids)
    shown = pipe.tokenizer.decode(result.token_ids, skip_special_tokens=False)
    assert said.decode("utf-8", errors="replace") == shown
    assert pipe.tokenizer.token_bytes(10_000) == b""


def test_tools_and_variables_reach_the_template(pipe: MirrorPipeline) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    bare = pipe.encode(messages=messages)
    assert pipe.encode(messages=messages, template_variables={"greeting": "Hello "}) != bare
    assert pipe.encode(messages=messages, tools=[{"type": "function", "function": {"name": "look"}}]) != bare
    result = pipe.generate(messages=messages, template_variables={"greeting": "Hello "}, max_new_tokens=2)
    assert result.prompt_ids == pipe.encode(messages=messages, template_variables={"greeting": "Hello "})
    for settings in ({"tools": [{}]}, {"template_variables": {"a": 1}}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} is for the chat template"):
            pipe.generate(PROMPT, **settings)
    with pytest.raises(ConfigError, match="template_variables names 'messages'; allowed: any but"):
        pipe.generate(messages=messages, template_variables={"messages": []})
    with pytest.raises(GenerationError, match="exactly one of"):
        pipe.encode(PROMPT, messages=messages)
    with pytest.raises(GenerationError, match=r"stop_token_ids\[1\] is 300"):
        pipe.generate("x", stop_token_ids=[5, 300])
    with pytest.raises(ConfigError, match="logit_bias names the id 300; allowed: 0 to 299"):
        pipe.generate(PROMPT, logit_bias={300: 1})
