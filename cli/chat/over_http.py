"""Answers from a running `mirrorsd serve`, over HTTP."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from mirrorsd.cli.chat.answers import CANCELLED, Ended, Piece
from mirrorsd.cli.input.options import KEY_VARIABLE
from mirrorsd.cli.input.requests import Messages
from mirrorsd.graphs.errors import ConfigError, ContextLengthError, DeviceError, GenerationError, MirrorError
from mirrorsd.graphs.names import METHODS

if TYPE_CHECKING:
    from mirrorsd.runtime import GenerationConfig

_SILENCE_S = 60.0
"""A server says something at least every ten seconds, if only that it is still there."""
_SENT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "method", "ignore_eos")


class _Address(NamedTuple):
    """Where a server listens; `path` is what stands before the server's own paths."""

    kind: type[HTTPConnection]
    host: str
    port: int
    path: str

    def connection(self) -> HTTPConnection:
        """A connection that is not open yet."""
        return self.kind(self.host, self.port, timeout=_SILENCE_S)


class OverHttp:
    """A server as `Answers`.

    Args:
        url: where it listens: `http://127.0.0.1:8600`, also with the `/v1` that other clients want.
        key: its API key, if it has one.
        model: which of its models; the first one by default.

    Raises:
        ConfigError: not a URL, or a key that no server has.
        DeviceError: nobody answers there, or another kind of server.
        GenerationError: the server refuses.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self._url, self._address = url.rstrip("/").removesuffix("/v1"), _address(url)
        self._headers = _authorization(key) if key else {}
        self._socket: socket.socket | None = None
        self._is_cancelled = False
        asked = urlencode({"model": model}, errors="replace") if model else ""
        props = self._json("GET", f"/props?{asked}" if asked else "/props")
        try:
            self._model, self._context = str(props["model"]), int(props["context"])
            self._methods = tuple(map(str, props.get("methods", METHODS)))
        except (LookupError, TypeError, ValueError) as error:
            raise self._no_server("its /props say no model and context") from error

    @property
    def name(self) -> str:
        """The server's name of the model."""
        return self._model

    @property
    def context(self) -> int:
        """The model's."""
        return self._context

    @property
    def advice(self) -> str:
        """None: it would be for whoever runs the server."""
        return ""

    def check_method(self, method: str) -> None:
        """Hold a method against those that the server named when the conversation began."""
        if method not in self._methods:
            raise ConfigError(f"method is {method!r}; the server's model runs {', '.join(self._methods)}.")

    def num_tokens(self, messages: Messages) -> int:
        """Tokens of a conversation, as the server's template and tokenizer have it."""
        try:
            prompt = self._json("POST", "/apply-template", {"model": self._model, "messages": messages})["prompt"]
            body = {"model": self._model, "content": prompt, "add_special": False}
            return len(self._json("POST", "/tokenize", body)["tokens"])
        except (LookupError, TypeError) as error:
            raise self._no_server("it makes no tokens of a conversation") from error

    def stream(self, messages: Messages, config: "GenerationConfig") -> Iterator[Piece]:
        """Answer, a piece per chunk of the stream."""
        self._is_cancelled = False
        said: list[str] = []
        num_tokens = 0
        try:
            for chunk in self._chunks(self._body(messages, config)):
                tokens = chunk.get("mirror_tokens", [])
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                said.append(text)
                num_tokens += len(tokens)
                ended = _ended("".join(said), chunk) if "mirror" in chunk else None
                yield Piece(text, len(tokens), sum(source == "window" for _, source in tokens), ended)
        except (OSError, HTTPException, ValueError) as error:
            if not self._is_cancelled:
                raise DeviceError(f"The server at {self._url} broke the answer off ({error}). Ask again.") from error
        if self._is_cancelled:
            stopped = Ended(
                text="".join(said), method=config.method, seed=config.seed, stop_reason=CANCELLED, num_tokens=num_tokens
            )
            yield Piece("", 0, 0, stopped)

    def cancel(self) -> None:
        """Hang up: the server then ends the answer within a step."""
        self._is_cancelled = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has hung up already
                self._socket = None

    def _body(self, messages: Messages, config: "GenerationConfig") -> dict[str, Any]:
        given = {name: getattr(config, name) for name in _SENT if getattr(config, name) is not None}
        if not config.use_defaults:
            given = {"repetition_penalty": 1.0, **given}
        stops = {"stop": list(config.stop_strings)} if config.stop_strings else {}
        shown = {"stream": True, "mirror_tokens": True}
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": config.max_new_tokens,
            **{**given, **stops, **shown},
        }

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection, response = self._ask("POST", "/v1/chat/completions", body)
        try:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk = _read_table(line[6:])
                if "error" in chunk:
                    raise _refusal(chunk["error"])
                yield chunk
        finally:
            self._socket = None
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection, response = self._ask(method, path, body)
        try:
            return _read_table(response.read())
        except (ValueError, HTTPException, OSError) as error:
            raise self._no_server(f"{path} gives {error}") from error
        finally:
            connection.close()

    def _no_server(self, why: str) -> DeviceError:
        return DeviceError(f"What answers at {self._url} is no mirrorsd server: {why}.")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request; its answer has been begun, and is no error.

        Raises:
            DeviceError: nobody answers, or no mirrorsd server.
            MirrorError: the server refuses.
        """
        connection = self._address.connection()
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        try:
            connection.connect()
            self._socket = connection.sock
            encoded = None if body is None else json.dumps(body).encode()
            connection.request(method, self._address.path + path, encoded, headers)
            response = connection.getresponse()
            refused = response.read() if response.status != 200 else b""
        except (OSError, HTTPException) as error:
            connection.close()
            if self._is_cancelled:
                raise
            raise DeviceError(
                f"No server answers at {self._url} ({error}). Start one: mirrorsd serve BUNDLE."
            ) from error
        if response.status != 200:
            connection.close()
            raise self._refused(path, response.status, refused)
        return connection, response

    def _refused(self, path: str, status: int, body: bytes) -> MirrorError:
        """What an answer of another status than 200 means."""
        try:
            error = _read_table(body).get("error")
        except ValueError:
            error = None
        if not isinstance(error, str | dict):
            return self._no_server(f"{path} gives status {status}, {body.decode(errors='replace')[:200]!r}")
        return _refusal(error, status)


def _address(url: str) -> _Address:
    """A URL taken apart.

    Raises:
        ConfigError: it is none of HTTP, or its host or port is none.
    """
    try:
        parts = urlsplit(url)
        kinds: dict[str, type[HTTPConnection]] = {"http": HTTPConnection, "https": HTTPSConnection}
        kind = kinds[parts.scheme]
        host = (parts.hostname or "").encode("idna").decode()
        path = quote(parts.path, safe="/%").rstrip("/").removesuffix("/v1")
        address = _Address(kind, host, kind.default_port if parts.port is None else parts.port, path)
        address.connection()  # refuses blanks in a host
    except (LookupError, ValueError, HTTPException):
        host = ""
    if not host:
        raise ConfigError(f"--url is {url!r}; allowed: a server's address, such as http://127.0.0.1:8600.")
    return address


def _authorization(key: str) -> dict[str, str]:
    """The header with a key.

    Raises:
        ConfigError: a server would not have such a key; it is never shown.
    """
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters, some of which are in no server's key; allowed: printable ASCII "
            "characters without spaces or ends of lines."
        )
    return {"Authorization": f"Bearer {key}"}


def _read_table(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _refusal(found: object, status: int | None = None) -> MirrorError:
    """The server's error as this program's."""
    error = found if isinstance(found, dict) else {"message": found}
    message = str(error.get("message") or error)
    if error.get("code") == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        return ConfigError(f"{message} Put the server's key into MIRRORSD_API_KEY.")
    return GenerationError(f"The server refuses{'' if status is None else f' ({status})'}: {message}")


def _ended(text: str, chunk: dict[str, Any]) -> Ended:
    timings, mirror = chunk["timings"], chunk["mirror"]
    return Ended(
        text=text,
        method=mirror["method"],
        seed=mirror["seed"],
        stop_reason=mirror["stop_reason"],
        num_tokens=timings["predicted_n"],
        num_prompt_tokens=timings["prompt_n"] + timings["cache_n"],
        num_reused_tokens=timings["cache_n"],
        first_token_ms=mirror["time_to_first_token_ms"],
        tokens_per_second=mirror.get("tokens_per_second") or timings["predicted_per_second"],
        tokens_per_step=mirror["tokens_per_step"],
        num_drafted=timings["draft_n"],
        num_accepted=timings["draft_n_accepted"],
        warnings=mirror["warnings"],
    )
