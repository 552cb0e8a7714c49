"""What somebody who means ill may try: each is a test, and none of them succeeds.

Everything goes through raw sockets, since well-behaved clients would mend what is wrong. After each attack a request is
answered as ever.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server import Running, ServerSettings
from mirrorsd.tests.end_to_end.server.serving_here import (
    BODY,
    CHAT,
    LIMITS,
    chat,
    get,
    post,
    raw,
    served,
    status_of,
)

KEY = "a-key-of-enough-characters"
pytestmark = pytest.mark.usefixtures("as_well_as_before")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.com", "localhost.evil.com:{port}", "127.0.0.1.evil.com:{port}", "evil.com:80@localhost:{port}"),
        *(
            "localhost",
            "127.0.0.1",
            "127.0.0.1:1",
            "localhost.:{port}",
            "0.0.0.0:{port}",
            "[::]:{port}",
            "127.1:{port}",
        ),
        *("2130706433:{port}", "localhost:{port}/", "user@127.0.0.1:{port}", "localhost:{port}.evil.com"),
        *("127.0.0.1:{port},evil.com", "lоcalhost:{port}", " ", "*"),
    ],
)
def test_a_name_that_is_not_ours_is_refused(serving: Running, host: str) -> None:
    name = host.format(port=serving.port).encode().decode("latin-1")
    assert status_of(get(serving, "/v1/models", host=name)) in (400, 421)
    assert status_of(get(serving, "/", host=name)) in (400, 421)


def test_no_host_and_two_hosts_are_refused(serving: Running) -> None:
    own = f"Host: 127.0.0.1:{serving.port}\r\n".encode()
    assert status_of(raw(serving, b"GET /v1/models HTTP/1.0\r\n\r\n")) == 421
    assert status_of(raw(serving, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400
    assert status_of(raw(serving, b"GET /v1/models HTTP/1.1\r\n" + own + b"Host: evil.com\r\n\r\n")) == 400
    assert status_of(raw(serving, b"GET /v1/models HTTP/1.0\r\n" + own + own + b"\r\n")) in (400, 421)
    assert (
        status_of(raw(serving, b"GET http://evil.com/v1/models HTTP/1.1\r\n" + own + b"Connection: close\r\n\r\n"))
        == 404
    )


def test_our_own_names_are_taken_in_any_case(serving: Running) -> None:
    for name in ("127.0.0.1", "LocalHost", "[::1]"):
        assert status_of(get(serving, "/v1/models", host=f"{name}:{serving.port}")) == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.com", "null", "http://localhost:1", "file://", "http://127.0.0.1.evil.com"]
)
def test_pages_of_other_sites_are_refused_before_anything_is_done(serving: Running, origin: str) -> None:
    answer = chat(serving, Origin=origin)
    assert status_of(answer) == 403
    assert b"access-control" not in answer.lower()
    for site in ("cross-site", "same-site"):
        assert status_of(chat(serving, Sec_Fetch_Site=site)) == 403
    preflight = (
        f"OPTIONS {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{serving.port}\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
    )
    answer = raw(serving, preflight.encode())
    assert status_of(answer) == 403
    assert b"access-control" not in answer.lower()


def test_our_own_page_may_ask(serving: Running) -> None:
    own = f"http://127.0.0.1:{serving.port}"
    assert status_of(chat(serving, Origin=own, Sec_Fetch_Site="same-origin")) == 200
    opened = get(serving, "/", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert status_of(opened) in (200, 404)  # a link to the page; 404 where no page is installed


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp", "multipart/form-data"]
)
def test_a_form_of_another_site_cannot_post(serving: Running, kind: str) -> None:
    assert status_of(chat(serving, Content_Type=kind)) == 415


def test_compressed_bodies_are_refused(serving: Running) -> None:
    import gzip

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


@pytest.mark.parametrize("value", ["-1", "1e999", "Infinity", "NaN", "9223372036854775808", "100000000", '"1"', "[]"])
@pytest.mark.parametrize("name", ["n", "top_k", "top_p", "temperature", "presence_penalty", "max_tokens"])
def test_numbers_out_of_range_are_refused(serving: Running, name: str, value: str) -> None:
    if (name, value) in {("max_tokens", "100000000"), ("max_tokens", "9223372036854775808"), ("top_k", "100000000")}:
        return
    if (name, value) == ("presence_penalty", "-1"):
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
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(65)], "tool_choice": "required"},
        {"response_format": {"type": "regex", "regex": "x" * 70_000}},
        {"response_format": {"type": "regex", "regex": "("}},
        {"response_format": {"type": "grammar", "grammar": "start: ("}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": -5}}}},
        {"chat_template_kwargs": {"messages": "none"}},
        {"chat_template_kwargs": {"x": {"nested": 1}}},
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


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/x", "file:///etc/passwd", "http://169.254.169.254/"])
def test_no_address_is_ever_opened(serving: Running, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        url = address.format(port=trap.getsockname()[1])
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = chat(serving, {"messages": [{"role": "user", "content": [part]}]})
        assert status_of(answer) == 400
        assert b"no URL is ever opened" in answer
        given = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}], "model": "tiny"}
        assert status_of(raw(serving, post(serving, "/v1/responses", json.dumps(given).encode()))) == 400
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/page/../app.py",
            "/page/..%2fapp.py",
            "/page/%2e%2e/app.py",
            "/page/%252e%252e%252fapp.py",
            "/page/..\\app.py",
        ),
        *("/page//etc/passwd", "/page/%00", "/page/index.html%00.js", "/page/....//app.py", "/../../etc/passwd"),
        *("/page/%5c..%5capp.py", "/page/C:/Windows/win.ini", "/page/", "/page", "/v1/models/../../etc/passwd"),
    ],
)
def test_no_path_leaves_the_pages_folder(serving: Running, path: str) -> None:
    answer = get(serving, path)
    assert status_of(answer) in (400, 404)
    assert b"import " not in answer
    assert b"root:" not in answer


def test_links_in_the_pages_folder_lead_nowhere(tmp_path: Path) -> None:
    from mirrorsd.server.transport.page_files import PageFiles

    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "link.txt").symlink_to(secret)
    (folder / "app.js").write_text("1")
    assert set(PageFiles(folder)._files) == {"app.js"}


def test_templates_of_a_bundle_cannot_reach_python_or_run_for_ever(tmp_path: Path, serving: Running) -> None:
    from mirrorsd.graphs.errors import GenerationError
    from mirrorsd.runtime.text.tokenizer import BundleTokenizer

    source = serving.service.shelf.loaded["tiny"].folder / "tokenizer"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ):
        (folder / "chat_template.jinja").write_text(text)
        with pytest.raises(GenerationError, match="refused"):
            BundleTokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_runs_for_ever_is_broken_off(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = serving.service.shelf.loaded["tiny"].tokenizer
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patched:
        template = tokenizer._template
        for name, compiled in template._compiled.items():
            patched.setitem(template._compiled, name, compiled.environment.from_string(loops))
        started = time.monotonic()
        assert status_of(chat(serving)) == 400
        assert time.monotonic() - started < 8


@pytest.fixture(scope="module")
def locked(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, keys=(KEY, "another-key-of-enough"), seats=1) as running:
        yield running


PATHS = ["/v1/models", "/metrics", "/props", "/slots", "/openapi.json", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong-key-of-enough", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_without_its_key_nothing_is_told(locked: Running, path: str, given: str) -> None:
    lines = [f"Authorization: {given}"] if given else []
    assert status_of(get(locked, path, *lines)) == 401
    assert status_of(get(locked, f"{path}?key={KEY}&api_key={KEY}", *lines)) == 401


def test_with_a_key_everything_is_there(locked: Running) -> None:
    for key in (KEY, "another-key-of-enough"):
        assert status_of(get(locked, "/v1/models", f"Authorization: Bearer {key}")) == 200
        assert status_of(chat(locked, Authorization=f"bearer {key}")) == 200
    assert status_of(chat(locked)) == 401
    assert status_of(get(locked, "/v1/models", f"Authorization: Bearer {KEY}", f"Authorization: Bearer {KEY}")) == 401
    assert status_of(get(locked, "/health")) == 200


def test_other_addresses_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", ""):
        with pytest.raises(ConfigError, match="needs an API key"):
            ServerSettings(host=host)
    with pytest.raises(ConfigError, match="at least 16"):
        ServerSettings(keys=("short",))
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=("*.example.com",))


def test_allowed_origins_and_hosts_are_exact(tiny_bundle: Path) -> None:
    ours = "https://chat.example.com"
    with served({"tiny": tiny_bundle}, allowed_origins=(ours,), allowed_hosts=("box.local",), seats=1) as running:
        answer = chat(running, Origin=ours)
        assert status_of(answer) == 200
        assert b"access-control-allow-origin: https://chat.example.com" in answer.lower()
        assert b"access-control-allow-credentials" not in answer.lower()
        for wrong in (f"{ours}.evil.com", "http://chat.example.com", f"{ours}:8443", "null"):
            assert status_of(chat(running, Origin=wrong)) == 403
        assert status_of(get(running, "/v1/models", host="box.local")) == 200
        assert status_of(get(running, "/v1/models", host="evil.box.local")) == 421


def test_no_line_of_the_log_can_be_forged_and_none_has_the_prompt(
    serving: Running, caplog: pytest.LogCaptureFixture
) -> None:
    from mirrorsd.server.transport.log import JsonLines

    with caplog.at_level(logging.DEBUG):
        chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}], "model": "x\r\n{\x1b[31m"})
        chat(
            serving,
            {"messages": [{"role": "user", "content": "the-secret-prompt"}], "temperature": "the-secret-prompt"},
        )
        chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}]}, User_Agent="a\x1b[31mb")
        get(serving, "/a%0d%0aforged%1b[31m")
    lines = [JsonLines().format(record) for record in caplog.records if record.name.startswith(("mirrorsd", "uvicorn"))]
    assert lines
    assert not [line for line in lines if "secret" in line or "\n" in line or "\x1b" in line]
    assert all(json.loads(line)["time"] for line in lines)


def test_seats_and_metrics_show_no_text(serving: Running) -> None:
    chat(serving, {"messages": [{"role": "user", "content": "the-secret-prompt"}]})
    for path in ("/slots", "/metrics", "/props"):
        assert b"secret" not in get(serving, path)


def test_memory_stays_flat_under_refused_requests(serving: Running) -> None:
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page

    big = b'{"messages": [' + b'{"role": "user", "content": "' + b"x" * 900_000 + b'"}]}'
    for _ in range(5):
        chat(serving, big)
    before = resident()
    for _ in range(100):
        assert status_of(chat(serving, big)) == 400
    assert resident() - before < 48 << 20
