"""What a request means for the pipeline: the fields of `GenerationConfig`, and what is refused by name."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mirrorsd.graphs.chat_defaults import SAMPLING
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import (
    ChatRequest,
    FormedRequest,
    GrammarFormat,
    ObjectFormat,
    RegexFormat,
    SchemaFormat,
)
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.fields import ALL, AS_EVER, PenalisedRequest, Reasoning, TextRequest
from mirrorsd.texts.config import LEAST_TEMPERATURE, GenerationConfig

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PLAINLY = [
    name
    for name in PenalisedRequest.model_fields
    if name in GenerationConfig.__slots__ and name not in TextRequest.model_fields
]
"""Fields that `GenerationConfig` has by the same name: a new one needs nothing here."""
Settings = dict[str, Any]
_HINTS = {"reasoning_effort": ("minimal", "low", "medium", "high", "xhigh"), "verbosity": ("low", "high")}
_OF_THOUGHTS = ("think", "reasoning")
"""Words of which one is in a template of models that write thoughts."""
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_MAPPINGS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords of a schema under which schemas stand by name."""
_CONSTANTS = ("const", "enum", "default", "example", "examples")
"""Keywords under which no schema stands."""
_LARGEST_DIVISOR = 100_000
"""Takes llguidance 0.4 s to compile, ten times as much twenty seconds: `bench/claims/serving/attacks.py` tries it."""


def text_settings(body: TextRequest, defaults: Mapping[str, Any]) -> Settings:
    """What every request says about its text; `defaults` are the checkpoint's own, or a chat's.

    A text is greedy with temperature 0, and below any that the runtime samples at. Without one it is sampled if the
    defaults say so, or if the request speaks of sampling: then at temperature 1, OpenAI's default. A seed beside
    temperature 0 changes nothing and is left out.
    """
    found: Settings = {"method": body.method, "ignore_eos": body.ignore_eos}
    if body.repetition_penalty is not None:
        found["repetition_penalty"] = body.repetition_penalty
    given = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) not in (None, AS_EVER)}
    if body.top_k == AS_EVER:
        given["top_k"] = 0
    if body.top_p == 0:
        given["top_p"] = 1 / ALL  # less than the best token has, whatever the vocabulary
    if "seed" in given:
        given["seed"] %= 1 << 64
    if body.temperature is not None and body.temperature < LEAST_TEMPERATURE:
        return found | {"temperature": 0.0}
    if given and "temperature" not in given and not defaults.get("do_sample"):
        given["temperature"] = 1.0
    return found | given


def sampled(settings: Settings, defaults: Mapping[str, Any]) -> Settings:
    """The same of a chat, with its own defaults where the request leaves open how it is sampled.

    >>> sampled({"min_p": 0.1}, {"do_sample": True, "temperature": 0.8, "min_p": 0.05})
    {'do_sample': True, 'temperature': 0.8, 'min_p': 0.1}
    """
    if settings.get("temperature") == 0 or not defaults.get("do_sample"):
        return settings
    return {name: defaults[name] for name in SAMPLING if name in defaults} | settings


def penalised_settings(body: PenalisedRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """The same with stops, penalties and bias."""
    found = text_settings(body, defaults)
    stops = [*filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or [])]
    if len(stops) > limits.stops:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {limits.stops} are taken.", param="stop")
    for stop in stops:
        if len(stop) > limits.stop_length:
            raise ApiError(400, f"stop: strings of up to {limits.stop_length} characters are taken.", param="stop")
    if stops:
        found["stop_strings"] = tuple(stops)
    if body.n is not None and body.n > limits.choices:
        raise ApiError(400, f"n is {body.n}; at most {limits.choices} choices are given.", param="n")
    if body.logit_bias and len(body.logit_bias) > limits.biases:
        raise ApiError(400, f"logit_bias: at most {limits.biases} tokens are taken.", param="logit_bias")
    return found | {name: getattr(body, name) for name in _PLAINLY if getattr(body, name) is not None}


def chat_settings(body: ChatRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """What a chat request says, its tools apart."""
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(400, "modalities: only ['text'] can be given.", param="modalities")
    if len(body.messages) > limits.messages:
        raise ApiError(400, f"messages: at most {limits.messages} are taken.", param="messages")
    found = penalised_settings(body, defaults, limits)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.logprobs:
        found |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return found | form_settings(body, limits)


def completion_settings(body: CompletionRequest, defaults: Mapping[str, Any], limits: Limits) -> Settings:
    """What a completion request says."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of: only as many as n are generated.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400, "echo: the prompt's tokens have no log-probabilities here; leave logprobs away.", param="echo"
        )
    found = penalised_settings(body, defaults, limits)
    if body.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": body.logprobs}
    return found | form_settings(body, limits)


def template_variables(template: str, **named: Any) -> tuple[dict[str, Any], list[str]]:
    """Fields that are variables of the chat template, and names of hints that it does not read.

    Whatever else it would not read is refused. A model whose template knows no effort does not reason: to ask for none
    is what it does anyway.

    >>> template_variables("{{ documents }}", documents=["a"], reasoning_effort="low", verbosity="low")
    ({'documents': ['a']}, ['reasoning_effort', 'verbosity'])
    """
    found, unread = {}, []
    for name, value in named.items():
        if value and name in template:
            found[name] = value
        elif value in _HINTS.get(name, ()):
            unread.append(name)
        elif value and (name, value) != ("reasoning_effort", "none"):
            message = f"{name}: this model's chat template does not read it. Leave it away."
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return found, unread


def wished(reasoning: Reasoning | None, template: str, verbosity: str | None, effort: str | None = None) -> Settings:
    """What a request wishes of the template beside its words: named as the template's variables are.

    Raises:
        ApiError: it says more of a model's thoughts, and this one has some.
    """
    more = {} if reasoning is None else reasoning.model_extra or {}
    name = next((name for name, value in more.items() if value is not None), None)
    if name is not None and any(word in template for word in _OF_THOUGHTS):
        message = f"reasoning.{name} is not honoured: use reasoning_effort or chat_template_kwargs."
        raise ApiError(400, message, param="reasoning", code="unsupported_parameter")
    effort = effort or (reasoning.effort if reasoning is not None else None)
    return {"reasoning_effort": effort, "verbosity": None if verbosity == "medium" else verbosity}


def format_settings(wanted: object, limits: Limits, param: str) -> Settings:
    """The constraint of a text by its format."""
    if isinstance(wanted, SchemaFormat) and wanted.json_schema is not None:
        return _form("json_schema", wanted.json_schema.schema_, limits, f"{param}.json_schema.schema")
    if isinstance(wanted, ObjectFormat | SchemaFormat):
        return _form("json_schema", wanted.schema_ or _ANY_OBJECT, limits, f"{param}.schema")
    if isinstance(wanted, RegexFormat | GrammarFormat):
        return _form(wanted.type, getattr(wanted, wanted.type), limits, param)
    return {}


def form_settings(body: FormedRequest, limits: Limits) -> Settings:
    """The constraint of a text, whichever way it is asked for.

    Raises:
        ApiError: two ways at once, or a form that is too big.
    """
    outer = body.structured_outputs
    found = {"response_format": format_settings(body.response_format, limits, "response_format")}
    given: list[tuple[str, str, object]] = [
        ("json_schema", "json_schema", body.json_schema),
        ("grammar", "grammar", body.grammar or None),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "grammar", _alternatives(body.guided_choice)),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if outer is not None:
        given += [
            ("structured_outputs.json", "json_schema", outer.json_),
            ("structured_outputs.regex", "regex", outer.regex),
            ("structured_outputs.choice", "grammar", _alternatives(outer.choice)),
            ("structured_outputs.grammar", "grammar", outer.grammar),
            ("structured_outputs.json_object", "json_schema", _ANY_OBJECT if outer.json_object else None),
        ]
    found |= {name: _form(kind, value, limits, name) for name, kind, value in given if value is not None}
    ways = [name for name, form in found.items() if form]
    if len(ways) > 1:
        raise ApiError(400, f"{ways[1]}: a text has one form, and {ways[0]} gives it one already.", param=ways[1])
    return found[ways[0]] if ways else {}


def _alternatives(choices: Sequence[str] | None) -> str | None:
    """A grammar of texts to choose from.

    >>> _alternatives(["yes", "no"])
    'start: "yes" | "no"'
    """
    return None if choices is None else "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def _form(kind: str, value: object, limits: Limits, param: str) -> Settings:
    if isinstance(value, str):
        if len(value.encode("utf-8", "replace")) > limits.schema_bytes:
            raise ApiError(400, f"{param} has more than {limits.schema_bytes} bytes.", param=param)
        if kind != "json_schema":
            return {kind: value}
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param} is no JSON.", param=param) from None
    check_schema(value, limits, param)
    return {"json_schema": value}


def check_schema(schema: object, limits: Limits, param: str) -> None:
    """Refuse a schema that is too big or too deep, or of another form, before anything reads it."""
    if depth_of(schema) > limits.nesting:
        raise ApiError(400, f"{param} is nested deeper than {limits.nesting} levels.", param=param)
    if len(json.dumps(schema)) > limits.schema_bytes:
        raise ApiError(400, f"{param} has more than {limits.schema_bytes} bytes.", param=param)
    for place, value in _members(schema):
        if place in _MAPPINGS and value is not None and not isinstance(value, dict):
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
