"""Fields of llama.cpp's and vLLM's requests: each does what it says, by every method, or is refused by name."""

import json
import re
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import post, raw, status_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"grammar": 'root ::= "fox" | "heron"'}, "fox|heron"),
    ({"grammar": 'start: "fox" | "heron"'}, "fox|heron"),
    ({"guided_grammar": 'root ::= "fo" [x] "es"'}, "foxes"),
    ({"guided_regex": "[fh]{3}"}, "[fh]{3}"),
    ({"guided_choice": ["the fox", 'a "heron"']}, 'the fox|a "heron"'),
    ({"structured_outputs": {"regex": "[fh]{3}"}}, "[fh]{3}"),
    ({"structured_outputs": {"choice": ["fox"]}}, "fox"),
    ({"structured_outputs": {"grammar": 'root ::= "fox"'}}, "fox"),
    ({"json_schema": CLOSED}, "json"),
    ({"guided_json": CLOSED}, "json"),
    ({"guided_json": json.dumps(CLOSED)}, "json"),
    ({"structured_outputs": {"json": CLOSED}}, "json"),
    ({"response_format": {"type": "json_object", "schema": CLOSED}}, "json"),
    ({"response_format": {"type": "json_schema", "schema": CLOSED}}, "json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": CLOSED}}}, "json"),
    ({"response_format": {"type": "regex", "regex": "[fh]{3}"}}, "[fh]{3}"),
]


def ask(running: Running, path: str, **more: Any) -> Any:
    begun = {"messages": [{"role": "user", "content": "fox"}]} if path == CHAT else {"prompt": "the old heron"}
    given = more if path == "/tokenize" else {**begun, "temperature": 0, "max_tokens": 60, **more}
    answer = raw(running, post(running, path, json.dumps(given).encode()))
    return json.loads(answer.split(b"\r\n\r\n", 1)[1]), answer


def text_of(document: Any) -> str:
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("form, wanted", FORMS, ids=lambda value: str(value)[:50])
def test_every_way_to_ask_for_a_form_is_kept(serving: Running, form: dict[str, Any], wanted: str) -> None:
    texts = {text_of(ask(serving, COMPLETIONS, method=method, **form)[0]) for method in ("plain", "mirror")}
    texts_of_chat = {text_of(ask(serving, CHAT, method=method, **form)[0]) for method in ("plain", "serial")}
    assert len(texts) == len(texts_of_chat) == 1
    for text in texts | texts_of_chat:
        if wanted == "json":
            assert json.loads(text)["a"] <= 99
        else:
            assert re.fullmatch(wanted, text)


@pytest.mark.parametrize(
    "path, more, param",
    [
        (CHAT, {"guided_regex": "a", "grammar": 'root ::= "b"'}, "guided_regex"),
        (COMPLETIONS, {"json_schema": {}, "guided_choice": ["a"]}, "guided_choice"),
        (CHAT, {"guided_json": "{"}, "guided_json"),
        (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (CHAT, {"min_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {"suffix": "the end"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"documents": [{"text": "x"}]}, "documents"),
        (CHAT, {"reasoning_effort": "with all its might"}, "reasoning_effort"),
        (CHAT, {"verbosity": "loud"}, "verbosity"),
        (COMPLETIONS, {"reasoning_effort": {"level": 1}}, "reasoning_effort"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"n_predict": 0}, "n_predict"),
        (COMPLETIONS, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(serving: Running, path: str, more: dict[str, Any], param: str) -> None:
    document, answer = ask(serving, path, **more)
    assert (status_of(answer), document["error"]["param"]) == (400, param)


RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    "path, more, names",
    [
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"reasoning": {"effort": "medium"}, "verbosity": "high"}, "reasoning_effort, verbosity"),
        (CHAT, {"reasoning": {"enabled": False}}, "reasoning.enabled"),
        (CHAT, {"reasoning": {"exclude": True}}, "reasoning.exclude"),
        (CHAT, {"reasoning": {"effort": "none"}, "verbosity": "medium"}, ""),
        (CHAT, {"reasoning": {}, "verbosity": ""}, ""),
        (COMPLETIONS, {"reasoning_effort": "low"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "medium"}}, "reasoning_effort"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "verbosity"),
    ],
    ids=str,
)
def test_hints_that_no_template_reads_are_named_and_change_nothing(
    serving: Running, path: str, more: dict[str, Any], names: str
) -> None:
    begun = {CHAT: {"messages": [{"role": "user", "content": "fox"}]}, COMPLETIONS: {"prompt": "fox"}}
    body = {"model": "tiny", **begun.get(path, {"input": "fox"}), "temperature": 0}
    plain, hinted = (raw(serving, post(serving, path, json.dumps({**body, **wish}).encode())) for wish in ({}, more))
    assert status_of(hinted) == 200
    head = hinted.partition(b"\r\n\r\n")[0].decode()
    assert re.findall(r"x-mirrorsd-unknown-fields: ([^\r]*)", head) == ([names] if names else [])
    texts = [re.findall('"(?:text|content)": "(?:[^"]*)"', answer.decode()) for answer in (plain, hinted)]
    assert texts[0] == texts[1] != []


def test_a_model_that_thinks_is_asked_in_its_own_words(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = serving.service.shelf.loaded["tiny"]
    monkeypatch.setattr(bundle, "chat_template", "{{ enable_thinking }}{{ reasoning_effort }}")
    document, answer = ask(serving, CHAT, reasoning={"enabled": False})
    assert (status_of(answer), document["error"]["param"]) == (400, "reasoning")
    plain = ask(serving, CHAT, reasoning={"effort": "low"}, max_tokens=2)[1]
    assert status_of(plain) == 200 and b"x-mirrorsd-unknown-fields" not in plain


def test_a_grammar_of_llama_cpp_that_is_none_is_refused(serving: Running) -> None:
    for grammar in ('root ::= "a', "root ::= " + "(" * 3000, "root ::= missing", "root ::= a\n" * 300):
        assert status_of(ask(serving, COMPLETIONS, grammar=grammar)[1]) == 400


def test_a_prompt_is_repeated_where_it_is_asked_for(serving: Running) -> None:
    plain = text_of(ask(serving, COMPLETIONS, max_tokens=5)[0])
    assert text_of(ask(serving, COMPLETIONS, max_tokens=5, echo=True)[0]) == "the old heron" + plain
    ids = ask(serving, "/tokenize", content="the old heron")[0]["tokens"]
    both = ask(serving, COMPLETIONS, max_tokens=5, echo=True, prompt=[ids, ids])[0]
    assert [choice["text"][:3] for choice in both["choices"]] == ["the", "the"]


def test_ids_that_end_a_text_do(serving: Running) -> None:
    """Half of all ids: a text of twelve tokens of a random model hardly has none of them."""
    cut = ask(serving, COMPLETIONS, max_tokens=12, ignore_eos=True, stop_token_ids=list(range(0, 300, 2)))[0]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 12
    whole = ask(serving, COMPLETIONS, max_tokens=12, ignore_eos=True, stop_token_ids=[])[0]
    assert whole["choices"][0]["finish_reason"] == "length"


def test_llama_cpps_name_for_the_most_tokens_counts(serving: Running) -> None:
    for path in (CHAT, COMPLETIONS):
        found = ask(serving, path, max_tokens=None, n_predict=3, ignore_eos=True)[0]
        assert found["usage"]["completion_tokens"] == 3


def test_a_conversation_ends_as_it_is_asked_to(serving: Running) -> None:
    begun = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "the old"}]

    def length(**more: Any) -> int:
        return int(ask(serving, CHAT, messages=begun, max_tokens=1, **more)[0]["usage"]["prompt_tokens"])

    def tokens(text: str) -> int:
        return len(ask(serving, "/tokenize", content=text)[0]["tokens"])

    written = "<|user|>fox<|assistant|>the old"
    assert length() == tokens(written + "<|assistant|>")
    assert length(continue_final_message=True) == length(add_generation_prompt=False) == tokens(written)


def test_fields_that_nobody_knows_are_told(serving: Running) -> None:
    _, answer = ask(serving, CHAT, max_tokens=1, tomorrow=1, user="me", stream_options={"next\r\nweek": 2})
    assert status_of(answer) == 200
    head = answer.split(b"\r\n\r\n", 1)[0].lower()
    assert b"x-mirrorsd-unknown-fields: tomorrow, stream_options.next%0d%0aweek" in head
    assert b'x-mirrorsd-unknown-fields: ""\r\n' in ask(serving, CHAT, max_tokens=1, **{"": 1})[1], "a name may be empty"
    assert b"x-mirrorsd-unknown-fields" not in ask(serving, CHAT, max_tokens=1, user="me")[1]
