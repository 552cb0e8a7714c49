"""Bodies that are malformed, too big or of a wrong form are the client's fault, and cost the server little."""

import gzip
import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import BODY, CHAT, LIMITS, chat, get, post, raw, status_of

pytestmark = pytest.mark.usefixtures("as_well_as_before")


def test_compressed_bodies_are_refused(serving: Running) -> None:

    bomb = gzip.compress(b"[" * (64 << 20))
    assert status_of(chat(serving, bomb, Content_Encoding="gzip")) == 415
    assert status_of(chat(serving, Content_Encoding="identity, deflate")) == 415


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"[" * 20_000, b'{"messages":' + b"[" * 100_000, b'{"a":' * 50_000),
        *(b'{"temperature": NaN}', b'{"temperature": 1e400}', b'{"seed": ' + b"9" * 6000 + b"}", b"\xff\xfe", b"\x00"),
        *(b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"n": -1}', b'{"max_tokens": -2147483649}'),
        b'{"messages": "x", "messages": 5}',
    ],
)
def test_malformed_bodies_are_refused_as_the_clients_fault(serving: Running, body: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/apply-template"):
        answer = raw(serving, post(serving, path, body))
        assert status_of(answer) == 400
        assert b'"error"' in answer
        assert b"Traceback" not in answer


def test_a_body_that_only_says_how_it_is_written_is_taken(serving: Running) -> None:
    body = json.dumps(BODY).encode()
    assert status_of(chat(serving, b"\xef\xbb\xbf" + body)) == 200
    assert status_of(chat(serving, body, Content_Encoding="Identity")) == 200
    assert status_of(chat(serving, {"model": ""})) == 200


@pytest.mark.parametrize("value", ["-3", "1e999", "Infinity", "NaN", "9223372036854775808", "100000000", '"1"', "[]"])
@pytest.mark.parametrize("name", ["n", "top_k", "top_p", "temperature", "presence_penalty", "max_tokens"])
def test_numbers_out_of_range_are_refused(serving: Running, name: str, value: str) -> None:
    if (name, value) in {("max_tokens", "100000000"), ("max_tokens", "9223372036854775808"), ("top_k", "100000000")}:
        return
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'
    assert status_of(chat(serving, body.encode())) == 400


def test_huge_numbers_that_mean_something_are_taken(serving: Running) -> None:
    assert status_of(chat(serving, {"seed": 10**30, "temperature": 1})) == 200
    assert (
        status_of(chat(serving, {"max_tokens": 10**18, "messages": [{"role": "user", "content": "a"}], "stop": "e"}))
        == 200
    )


def test_bodies_are_bounded_by_what_they_say_and_by_what_they_are(serving: Running) -> None:
    most, fitting = LIMITS.body_bytes, LIMITS.body_bytes_for(512)
    assert status_of(raw(serving, post(serving, CHAT, b"", Content_Length=str(most + 1)))) == 413
    assert status_of(raw(serving, post(serving, CHAT, b"", Content_Length=str(10**30)))) in (400, 413)
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    head = post(serving, CHAT, b"", Content_Length="", Transfer_Encoding="chunked")
    assert status_of(raw(serving, head + chunk * 17)) == 413
    for kind, status in (("application/json", "413"), ("text/plain", "415")):
        asked = urllib.request.Request(serving.url + CHAT, b" " * (16 * most), {"Content-Type": kind})
        with pytest.raises(urllib.error.HTTPError, match=status):  # this client reads no answer before all is sent
            urllib.request.urlopen(asked, timeout=60)
    assert status_of(chat(serving, b" " * (fitting - 200) + json.dumps(BODY).encode())) == 200


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}}}


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "a" * 512 * 16}),
        ("/v1/completions", {"prompt": [1] * 5000}),
        ("/v1/completions", {"prompt": [1] * 512}),
        ("/v1/completions", {"prompt": "a" * 600_000}),
        ("/v1/completions", {"prompt": [[]] * 70_000}),
        ("/tokenize", {"content": "a" * 512 * 16}),
        (CHAT, {**BODY, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
        (CHAT, {**BODY, "chat_template_kwargs": {"greeting": "a" * 512 * 16}}),
        (CHAT, {**BODY, "prediction": {"type": "content", "content": "a" * 512 * 16}}),
        (CHAT, {**BODY, "messages": [{"role": "user", "content": "a" * 1000}] * 9}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_more_than_the_context_can_hold_is_refused_before_it_is_read(
    serving: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    tokenizer = serving.service.shelf.loaded["tiny"].tokenizer
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "_ids", lambda *_, **__: pytest.fail("it was read"))
        answer = raw(serving, post(serving, path, json.dumps(body).encode()))
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert (status_of(answer), error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": [1]},
        {"definitions": "x"},
        {"$defs": {"a": {"$defs": 5}}},
        {"properties": ["a"]},
        {"type": "object", "properties": {"a": {"properties": 1}}},
        {"type": "array", "items": {"patternProperties": [{}]}},
        {"anyOf": [{"type": "object", "properties": 7}]},
        {"type": "integer", "multipleOf": 1_000_003},
    ],
    ids=str,
)
def test_a_schema_of_another_form_is_refused(serving: Running, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for body in (
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        assert status_of(chat(serving, body)) == 400


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "grammar", "grammar": "start: " + ' | "b"' * 3000},
        {"type": "regex", "regex": "(" * 5000},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(" * 5000}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "x" * 5000}}},
        {"type": "x" * 5000},
    ],
    ids=lambda wanted: str(wanted)[:40],
)
def test_errors_are_short(serving: Running, wanted: dict[str, Any]) -> None:
    answer = chat(serving, {"response_format": wanted})
    assert status_of(answer) == 400
    assert len(answer.split(b"\r\n\r\n", 1)[1]) < 1500


def test_heads_are_bounded(serving: Running) -> None:
    assert status_of(get(serving, "/v1/models", "X: " + "a" * LIMITS.head_bytes)) in (0, 400, 431)
    assert status_of(get(serving, "/" + "a" * 2 * LIMITS.head_bytes)) in (0, 400, 414, 431)
    assert status_of(get(serving, "/v1/models", *(f"X{n}: {n}" for n in range(4000)))) in (0, 400, 431)


@pytest.mark.parametrize(
    "body",
    [
        {"stop": ["x" * 257]},
        {"logit_bias": {str(n): 1 for n in range(1025)}},
        {"logit_bias": {"999999": 1}},
        {"messages": [{"role": "user", "content": "x"}] * 2049},
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)], "tool_choice": "required"},
        {"response_format": {"type": "regex", "regex": "x" * 70_000}},
        {"response_format": {"type": "regex", "regex": "("}},
        {"response_format": {"type": "grammar", "grammar": "start: ("}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": -5}}}},
        {"chat_template_kwargs": {"messages": "none"}},
        {"chat_template_kwargs": [1]},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ],
    ids=lambda body: str(body)[:60],
)
def test_bounds_and_malformed_constraints_are_refused(serving: Running, body: dict[str, Any]) -> None:
    assert status_of(chat(serving, body)) == 400
    assert status_of(chat(serving, {**body, "stream": True})) == 400


def test_a_schema_that_is_nested_too_deeply_is_refused(serving: Running) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert status_of(chat(serving, {"response_format": wanted})) == 400
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert status_of(chat(serving, {"tools": [tool], "tool_choice": "required"})) == 400


def test_a_regular_expression_that_blows_up_elsewhere_does_not_here(serving: Running) -> None:
    started = time.monotonic()
    answer = chat(serving, {"response_format": {"type": "regex", "regex": "(a|a)*" * 12 + "b(a+)+$"}, "max_tokens": 8})
    assert status_of(answer) in (200, 400)
    assert time.monotonic() - started < 10
