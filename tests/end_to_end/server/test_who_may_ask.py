"""Names, sites and keys: who may ask, and that nobody else is told anything. Everything goes through raw sockets."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server import Running, ServerSettings
from mirrorsd.server.front import build_front
from mirrorsd.tests.end_to_end.server.serving_here import BODY, CHAT, chat, get, post, raw, served, status_of

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
        == 400
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


@pytest.fixture(params=["server", "front"])
def closed(locked: Running, request: pytest.FixtureRequest) -> Iterator[Running]:
    with ExitStack() as stack:
        settings = ServerSettings(port=0, keys=(KEY,))
        is_front = request.param == "front"
        yield stack.enter_context(Running(build_front([locked.url], settings), settings)) if is_front else locked


LEADING_ELSEWHERE = [
    *("/page/../v1/chat/completions", "/page/..//v1/chat/completions", "/page/./../v1/chat/completions"),
    *("/page/%2e%2e/v1/chat/completions", "/page/.%2E/v1/chat/completions", "/page%2F..%2Fv1/chat/completions"),
    *("/page/..\\v1/chat/completions", "/page/..%5cv1/chat/completions", "/page\\..\\..\\v1/chat/completions"),
    *("//page/../v1/chat/completions", "%2Fpage%2F..%2Fv1/chat/completions", "/health/../v1/chat/completions"),
]
SPELLINGS = [
    "/v1/chat/completions",
    "//v1//chat/completions/",
    "/v1%2Fchat%2Fcompletions",
    "/v1/../x",
    "/page/%252e%252e",
]


@pytest.mark.parametrize("path", LEADING_ELSEWHERE)
def test_no_spelling_of_a_path_leads_past_the_key(closed: Running, path: str) -> None:
    """What is open without a key is open by its own name alone, at a server and through a front."""
    body = json.dumps(BODY).encode()
    assert status_of(raw(closed, post(closed, path, body))) == 400
    assert status_of(raw(closed, post(closed, path, body, Authorization=f"Bearer {KEY}"))) == 400


@pytest.mark.parametrize("path", SPELLINGS)
def test_every_spelling_of_a_path_needs_the_key(closed: Running, path: str) -> None:
    assert status_of(raw(closed, post(closed, path, json.dumps(BODY).encode()))) in (400, 401, 404, 405)


@pytest.mark.parametrize(
    "target", ["%2Fpage%2F@{trap}/inner", "%2Fv1:x/", "%2Fpage@{trap}/x", "@{trap}/page/", "//{trap}/page/x", "page/x"]
)
def test_a_path_never_names_another_server(locked: Running, target: str) -> None:
    settings = ServerSettings(port=0)
    with (
        socket.create_server(("127.0.0.1", 0)) as trap,
        Running(build_front([locked.url], settings), settings) as front,
    ):
        trap.settimeout(0.1)
        path = target.format(trap=f"127.0.0.1:{trap.getsockname()[1]}")
        answer = get(front, path)
        assert status_of(answer) == (401 if path.startswith("/") else 400) and b'"error"' in answer
        with pytest.raises(TimeoutError):
            trap.accept()


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


@pytest.fixture(params=["server", "front"])
def open_to_pages(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    settings: dict[str, Any] = {"allowed_origins": ("app://Notes", "https://Chat.example.com"), "keys": (KEY,)}
    with served({"tiny": tiny_bundle}, seats=1, **settings) as running, ExitStack() as stack:
        front = ServerSettings(port=0, **settings)
        is_front = request.param == "front"
        yield stack.enter_context(Running(build_front([running.url], front), front)) if is_front else running


def test_pages_of_allowed_sites_and_apps_may_ask_as_their_libraries_do(open_to_pages: Running) -> None:
    """OpenAI's library sends headers of its own, for which a browser asks first; refusals are to be read, too."""
    asked = ["Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-stainless-lang"]
    asked.append("Access-Control-Request-Private-Network: true")
    for origin in ("app://notes", "https://chat.example.com"):
        allowed = f"access-control-allow-origin: {origin}".encode()
        lines = [f"OPTIONS {CHAT} HTTP/1.1", f"Host: 127.0.0.1:{open_to_pages.port}", f"Origin: {origin}", *asked]
        answer = raw(open_to_pages, "\r\n".join([*lines, "Connection: close", "", ""]).encode())
        assert status_of(answer) == 200
        assert b"x-stainless-lang" in answer and allowed in answer.lower()
        assert b"access-control-allow-private-network: true" in answer.lower()
        answer = chat(open_to_pages, Origin=origin, Authorization=f"Bearer {KEY}")
        assert status_of(answer) == 200 and allowed in answer.lower()
        answer = chat(open_to_pages, Origin=origin, Authorization="Bearer another-key-of-enough")
        assert status_of(answer) == 401 and allowed in answer.lower()
    assert status_of(chat(open_to_pages, Origin="app://other", Authorization=f"Bearer {KEY}")) == 403


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, {"Authorization": "Bearer another-key"}, 401),
        (CHAT, {"Origin": "https://evil.com"}, 403),
        (CHAT, {"Host": "evil.com"}, 421),
        ("/nowhere", {}, 404),
        ("/v1/models", {}, 405),
        ("/page/../x", {}, 400),
        (CHAT, {"X-Mirrorsd-Resume": "not JSON"}, 400),
    ],
)
def test_a_refusal_is_told_to_who_sends_much(closed: Running, path: str, headers: dict[str, str], status: int) -> None:
    """A client that sends all before it reads would see a broken connection instead."""
    usual = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with closing(HTTPConnection("127.0.0.1", closed.port, timeout=60)) as opened:
        opened.request("POST", path, bytes(6 << 20), usual | headers)
        answer = opened.getresponse()
        assert answer.status == status
        assert json.load(answer)["error"]["message"]
