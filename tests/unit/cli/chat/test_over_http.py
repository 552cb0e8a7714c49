"""A conversation over HTTP: addresses, keys, and what answers there that is no server of this project."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from mirrorsd.cli.application import run
from mirrorsd.cli.chat.over_http import OverHttp
from mirrorsd.graphs.errors import ConfigError, DeviceError, GenerationError
from mirrorsd.runtime import GenerationConfig

PROPS = {"model": "tiny", "context": 512, "methods": ["auto", "plain"], "advice": "`mirrorsd tune BUNDLE` helps."}


@contextmanager
def answering(*answers: Any, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers (the last one with `status`), and the paths that it was asked for."""
    left, asked = list(answers), list[str]()

    class Other(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = left.pop(0)
            self.send_response(200 if left else status)
            self.end_headers()
            self.wfile.write(found if isinstance(found, bytes) else json.dumps(found).encode())

        do_GET = do_POST = answer  # noqa: N815 (names of http.server)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=lambda: [server.handle_request() for _ in answers], daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999",
        "http://h:abc",
        "http://[::1",
        "http://ä..x",
        "http://a b",
        "http://",
        "ftp://h",
        "h",
        "http://h/\udcff",
    ],
)
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url is .*; allowed: a server's address, such as http://127"):
        OverHttp(url)


@pytest.mark.parametrize(
    "key", ["a-key-of-a-file\n", "ключ-сервера-очень-длинный", "two words of a key", "\udcff" * 20]
)
def test_a_key_that_no_header_carries_is_refused_unseen(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"MIRRORSD_API_KEY has {len(key)} characters, .*; allowed: printable"
    ) as found:
        OverHttp("http://127.0.0.1:9", key)
    assert key not in str(found.value)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_address_of_openai_s_clients_is_one_too(path: str) -> None:
    with answering(PROPS) as (url, asked):
        OverHttp(f"{url}{path}")
    assert asked == ["/props"]


def test_other_letters_in_a_path_and_in_a_model_s_name_are_sent_as_urls_have_them() -> None:
    with answering(PROPS) as (url, asked):
        OverHttp(f"{url}/ä/v1", model="ü\udcff")
    assert asked == ["/%C3%A4/props?model=%C3%BC%3F"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        *((404, answer) for answer in (None, [1], {}, {"error": None}, {"detail": "Not Found"}, b"<html>")),
        *(
            (200, answer)
            for answer in ([1], 5, None, [[1, 2]], b"<html>", b"[" * 100_000, {}, {"model": "m", "context": None})
        ),
    ],
)
def test_another_kind_of_server_is_none(status: int, answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer, status=status) as (url, _):
        assert run(["chat", "--url", url]) == 4
    assert f"What answers at {url} is no mirrorsd server: " in capsys.readouterr().err


@pytest.mark.parametrize("error", ["not found", {"message": "not found"}])
def test_a_refusal_is_read_in_every_form(error: Any) -> None:
    with (
        answering({"error": error}, status=404) as (url, _),
        pytest.raises(GenerationError, match=r"The server refuses \(404\): not found"),
    ):
        OverHttp(url)


@pytest.mark.parametrize(("line", "message"), [(b"5", "no JSON object"), (b'{"error": "too hot"}', "too hot")])
def test_a_stream_of_something_else_breaks_the_answer_off(line: bytes, message: str) -> None:
    with answering(PROPS, b"data: " + line + b"\n\n") as (url, _):
        answers = OverHttp(url)
        with pytest.raises((DeviceError, GenerationError), match=message):
            list(answers.stream([{"role": "user", "content": "hi"}], GenerationConfig()))


def test_a_server_without_a_tokenizer_is_none() -> None:
    with answering(PROPS, {"text": "hi"}) as (url, _):
        answers = OverHttp(url)
        with pytest.raises(DeviceError, match="it makes no tokens of a conversation"):
            answers.num_tokens([{"role": "user", "content": "hi"}])


def test_the_server_s_methods_count_and_its_advice_is_not_for_its_guests() -> None:
    with answering(PROPS) as (url, _):
        answers = OverHttp(url)
    assert answers.advice == ""
    answers.check_method("plain")
    with pytest.raises(ConfigError, match=r"method is 'eagle3'; the server's model runs auto, plain\."):
        answers.check_method("eagle3")
