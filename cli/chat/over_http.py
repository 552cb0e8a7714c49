"""Answers from a running `mirrorsd serve`, over HTTP."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from mirrorsd.cli.chat.answers import CANCELLED, Ended, Piece
from mirrorsd.cli.input.requests import Messages
from mirrorsd.graphs.errors import ConfigError, ContextLengthError, DeviceError, GenerationError, MirrorError
from mirrorsd.runtime.ledger import Span

if TYPE_CHECKING:
    from mirrorsd.runtime import GenerationConfig

_SILENCE_S = 60.0
"""A server says something at least every ten seconds, if only that it is still there."""
_SENT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "method", "ignore_eos")


class OverHttp:
    """A server as `Answers`.

    Args:
        url: where it listens: `http://127.0.0.1:8600`.
        key: its API key, if it has one.
        model: which of its models; the first one by default.

    Raises:
        ConfigError: not a URL.
        DeviceError: nobody answers there.
        GenerationError: the server refuses.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; allowed: a server's address, such as http://127.0.0.1:8600.")
        self._url, self._parts = url, parts
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._socket: socket.socket | None = None
        self._is_cancelled = False
        props = self._json("GET", "/props" + (f"?{urlencode({'model': model})}" if model else ""))
        try:
            self._model, self._context = str(props["model"]), int(props["context"])
        except (LookupError, TypeError, ValueError) as error:
            raise DeviceError(
                f"What answers at {url} is no mirrorsd server: its /props say no model and context."
            ) from error
        self._advice = str(props.get("advice", ""))

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
        """The server's, when the conversation began."""
        return self._advice

    def num_tokens(self, messages: Messages) -> int:
        """Tokens of a conversation, as the server's template and tokenizer have it."""
        prompt = self._json("POST", "/apply-template", {"model": self._model, "messages": messages})["prompt"]
        body = {"model": self._model, "content": prompt, "add_special": False}
        return len(self._json("POST", "/tokenize", body)["tokens"])

    def stream(self, messages: Messages, config: "GenerationConfig") -> Iterator[Piece]:
        """Answer, a piece per chunk of the stream."""
        self._is_cancelled = False
        said: list[str] = []
        spans: list[Span] = []
        num_tokens = 0
        try:
            for chunk in self._chunks(self._body(messages, config)):
                spans += [Span(d, name, 1e-3 * start, 1e-3 * end) for d, name, start, end in chunk["mirror_timeline"]]
                tokens = chunk.get("mirror_tokens", [])
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                said.append(text)
                num_tokens += len(tokens)
                ended = _ended("".join(said), chunk, spans) if "mirror" in chunk else None
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
        shown = {"stream": True, "mirror_tokens": True, "mirror_timeline": True}
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
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise _refusal(chunk)
                yield {"mirror_timeline": [], **chunk}
        finally:
            self._socket = None
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection, response = self._ask(method, path, body)
        try:
            return dict(json.loads(response.read()))
        except (ValueError, HTTPException, OSError) as error:
            raise DeviceError(f"What answers at {self._url}{path} is no mirrorsd server ({error}).") from error
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request; its answer has been begun, and is no error.

        Raises:
            DeviceError: nobody answers.
            MirrorError: the server refuses.
        """
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_SILENCE_S)
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        try:
            connection.connect()
            self._socket = connection.sock
            encoded = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, encoded, headers)
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
            raise _refusal(_read_error(refused), response.status)
        return connection, response


def _read_error(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body))
    except ValueError:
        return {"error": {"message": body.decode(errors="replace")[:200]}}


def _refusal(document: dict[str, Any], status: int | None = None) -> MirrorError:
    """The server's error as this program's."""
    error = document.get("error") or {}
    message = str(error.get("message") or document)
    if error.get("code") == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        return ConfigError(f"{message} Put the server's key into MIRRORSD_API_KEY.")
    return GenerationError(f"The server refuses{'' if status is None else f' ({status})'}: {message}")


def _ended(text: str, chunk: dict[str, Any], spans: list[Span]) -> Ended:
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
        spans=tuple(spans),
        warnings=mirror["warnings"],
    )
