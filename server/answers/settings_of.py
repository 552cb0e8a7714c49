"""What a request means for the pipeline: the fields of `GenerationConfig`, and what is refused by name."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import (
    ChatRequest,
    GrammarFormat,
    ObjectFormat,
    RegexFormat,
    SchemaFormat,
)
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.fields import PenalisedRequest, TextRequest

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PLAINLY = ("presence_penalty", "frequency_penalty", "logit_bias")
Settings = dict[str, Any]
_MAPPINGS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords of a schema under which schemas stand by name."""
_CONSTANTS = ("const", "enum", "default", "example", "examples")
"""Keywords under which no schema stands."""
_LARGEST_DIVISOR = 100_000
"""Takes llguidance 0.4 s to compile, ten times as much twenty seconds: `bench/claims/serving/attacks.py` tries it."""


def text_settings(body: TextRequest, defaults: Mapping[str, Any]) -> Settings:
    """What every request says about its text; `defaults` are the checkpoint's own.

    A text is greedy with temperature 0. Without one it is sampled if the checkpoint says so, or if the request speaks
    of sampling: then at temperature 1, OpenAI's default. A seed beside temperature 0 changes nothing and is left out.
    """
    found: Settings = {"method": body.method, "ignore_eos": body.ignore_eos}
    if body.repetition_penalty is not None:
        found["repetition_penalty"] = body.repetition_penalty
    given = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    if "seed" in given:
        given["seed"] %= 1 << 64
    if body.temperature == 0:
        return found | {"temperature": 0.0}
    if given and "temperature" not in given and not defaults.get("do_sample"):
        given["temperature"] = 1.0
    return found | given


def penalised_settings(body: PenalisedRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """The same with stops, penalties and bias."""
    found = text_settings(body, defaults)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.stops:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {limits.stops} are taken.", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= limits.stop_length:
            raise ApiError(400, f"stop: strings of 1 to {limits.stop_length} characters are taken.", param="stop")
    if stops:
        found["stop_strings"] = tuple(stops)
    if body.n is not None and body.n > limits.choices:
        raise ApiError(400, f"n is {body.n}; at most {limits.choices} choices are given.", param="n")
    if body.logit_bias and len(body.logit_bias) > limits.biases:
        raise ApiError(400, f"logit_bias: at most {limits.biases} tokens are taken.", param="logit_bias")
    for name in _PLAINLY:
        if getattr(body, name):
            found[name] = getattr(body, name)
    return found


def chat_settings(body: ChatRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """What a chat request says, its tools apart."""
    refuse_fields(body, functions="tools", function_call="tool_choice", audio=None, web_search_options=None)
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(400, "modalities: only ['text'] can be given.", param="modalities")
    if len(body.messages) > limits.messages:
        raise ApiError(400, f"messages: at most {limits.messages} are taken.", param="messages")
    found = penalised_settings(body, defaults, limits)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.logprobs:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return found | format_settings(body.response_format, limits, "response_format")


def completion_settings(body: CompletionRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """What a completion request says."""
    refuse_fields(body, echo=None, suffix=None)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of: only as many as n are generated.", param="best_of")
    found = penalised_settings(body, defaults, limits)
    if body.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": body.logprobs}
    return found


def format_settings(wanted: object, limits: Limits, param: str) -> Settings:
    """The constraint of a text by its format."""
    if isinstance(wanted, ObjectFormat):
        return {"json_schema": {"type": "object", "additionalProperties": True}}
    if isinstance(wanted, SchemaFormat):
        check_schema(wanted.json_schema.schema_, limits, f"{param}.json_schema.schema")
        return {"json_schema": wanted.json_schema.schema_}
    if isinstance(wanted, RegexFormat | GrammarFormat):
        name = wanted.type
        text = str(getattr(wanted, name))
        if len(text.encode("utf-8", "replace")) > limits.schema_bytes:
            raise ApiError(400, f"{param}.{name} has more than {limits.schema_bytes} bytes.", param=param)
        return {name: text}
    return {}


def check_schema(schema: object, limits: Limits, param: str) -> None:
    """Refuse a schema that is too big or too deep, or of another form, before anything reads it."""
    if depth_of(schema) > limits.nesting:
        raise ApiError(400, f"{param} is nested deeper than {limits.nesting} levels.", param=param)
    if len(json.dumps(schema)) > limits.schema_bytes:
        raise ApiError(400, f"{param} has more than {limits.schema_bytes} bytes.", param=param)
    for place, value in _members(schema):
        if place in _MAPPINGS and not isinstance(value, dict):
            raise ApiError(400, f"{param}: {place} is not an object.", param=param)
        if place == "multipleOf" and _is_above(value, _LARGEST_DIVISOR):
            raise ApiError(400, f"{param}: multipleOf is above {_LARGEST_DIVISOR}.", param=param)


def _members(schema: object) -> Iterator[tuple[str, object]]:
    """Keywords and their values, of a schema and of those in it; names of properties are none, nor are constants."""
    open_ones = [schema]
    while open_ones:
        found = open_ones.pop()
        if isinstance(found, list):
            open_ones += found
        elif isinstance(found, dict):
            yield from found.items()
            for place, value in found.items():
                if place in _MAPPINGS and isinstance(value, dict):
                    open_ones += value.values()
                elif place not in _CONSTANTS:
                    open_ones.append(value)


def _is_above(value: object, most: float) -> bool:
    return isinstance(value, int | float) and value > most


def depth_of(value: object) -> int:
    """How deep lists and objects are nested, without recursion.

    >>> depth_of({"a": [1, {"b": 2}]}), depth_of(5)
    (3, 0)
    """
    depth, level = 0, [value]
    while True:
        level = [
            child
            for found in level
            if isinstance(found, dict | list)
            for child in [*(found.values() if isinstance(found, dict) else found), None]
        ]
        if not level:
            return depth
        depth += 1


def refuse_fields(body: object, **alternatives: str | None) -> None:
    """Refuse what would be silently wrong where it says something."""
    for name, alternative in alternatives.items():
        if getattr(body, name) not in (None, False, "", []):
            advice = f"use {alternative}" if alternative else "leave it away"
            raise ApiError(400, f"{name} is not supported: {advice}.", param=name, code="unsupported_parameter")
