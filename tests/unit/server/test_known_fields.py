"""One table says of every published field what becomes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.server.wire.chat import ChatRequest
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.known_fields import HARMLESS, REFUSED, refused_field, unknown_fields

PUBLISHED = json.loads((Path(__file__).parent / "published_fields.json").read_text(encoding="utf-8"))
"""Names only, by the kind of request and where they were read."""
CHAT = {"messages": [{"role": "user", "content": "fox"}]}
MODELS = {"chat": (ChatRequest, CHAT), "completions": (CompletionRequest, {"prompt": "fox"})}


def honoured(kind: str) -> set[str]:
    return {field.alias or name for name, field in MODELS[kind][0].model_fields.items()}


def made(kind: str, **more: Any) -> Any:
    model, body = MODELS[kind]
    return model.model_validate({**body, **more})


@pytest.mark.parametrize("kind", MODELS)
def test_every_published_field_has_its_place(kind: str) -> None:
    published = {name for names in PUBLISHED[kind].values() for name in names}
    refused = {name for name in published - honoured(kind) if refused_field(made(kind, **{name: {"is": "given"}}))}
    assert published - honoured(kind) - refused - HARMLESS == set()


@pytest.mark.parametrize("kind", MODELS)
def test_the_openai_package_that_is_here_has_no_others(kind: str) -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    module: Any = chat_create_params if kind == "chat" else completion_create_params
    found = set(module.CompletionCreateParamsBase.__annotations__)
    assert len(found) > 15
    assert found - honoured(kind) - REFUSED.keys() - HARMLESS == set()


def test_no_field_has_two_places() -> None:
    assert not REFUSED.keys() & HARMLESS


@pytest.mark.parametrize(
    "name, value",
    [
        *(("mirostat", 2), ("min_tokens", 5), ("repeat_penalty", 1.1), ("suffix", "x"), ("best_of", 3)),
        *(("use_beam_search", True), ("think", False), ("options", {"num_ctx": 4096}), ("bad_words", ["x"])),
        *(("functions", [{}]), ("chat_template", "x"), ("prompt", "x"), ("input", "x"), ("samplers", [])),
        *(("mirostat", True), ("typical_p", 0.9), ("lora", [{"id": 0}]), ("n_probs", 3)),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    refused = refused_field(made("chat", **{name: value}))
    assert refused is not None
    assert refused.name == name
    assert not unknown_fields(made("chat", **{name: value}))


@pytest.mark.parametrize(
    "name, value",
    [
        *(("mirostat", 0), ("min_tokens", 0), ("repeat_penalty", 1.0), ("suffix", ""), ("best_of", 1)),
        *(("function_call", "auto"), ("function_call", "none")),
        *(("use_beam_search", False), ("think", None), ("options", {}), ("bad_words", []), ("typical_p", 1)),
        *(("user", "me"), ("store", True), ("metadata", {"a": "b"}), ("timings_per_token", True), ("dry_base", 1.7)),
    ],
)
def test_what_changes_nothing_is_taken(name: str, value: Any) -> None:
    body = made("chat", **{name: value})
    assert refused_field(body) is None
    assert not unknown_fields(body)


def test_unknown_fields_are_told_within_objects_too() -> None:
    body = made("chat", tomorrow=1, stream_options={"include_usage": True, "next_week": 2})
    assert refused_field(body) is None
    assert unknown_fields(body) == ["tomorrow", "stream_options.next_week"]
    assert len(unknown_fields(made("chat", **{f"x{n}" * 40: 1 for n in range(100)}))) == 16


def test_what_stands_in_messages_is_the_templates() -> None:
    message = {"role": "assistant", "content": "fox", "reasoning_content": "hm"}
    assert not unknown_fields(ChatRequest.model_validate({"messages": [message]}))
