"""The served half of `../soak.py`: clients of a server that is killed now and then, and what they got.

Each client asks one thing after the other: chats whole and as streams, tools, prompts that fill half of the context,
streams that are left in the middle, and requests that are refused. A text must be the one that a plain request of the
same seed got, when it was first asked for. What fails while no server runs is the soak's own doing; anything else is a
failure.
"""

import http
import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import psutil

from mirrorsd.bench.claims.serving.commands import Command
from mirrorsd.bench.runs import Messages

_CLIENTS = 4
_ANSWER_S, _LOOK_S = 300.0, 0.2
_WHOLE, _LEFT, _REFUSED, _TOOLS, _LONG = 0.5, 0.2, 0.1, 0.2, 0.1
"""Shares of requests that want no stream, of streams that are left, of requests refused, with a tool, with much."""
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}}},
}


class ServedSoak:
    """A server, its clients, and their counts; use it as a context manager."""

    def __init__(self, bundle: Path, prompts: Sequence[Messages], device_map: str, tokens: int, seed: int) -> None:
        self._server = Command("serve", str(bundle), "--device-map", device_map, "--seats", str(_CLIENTS))
        self._prompts, self._tokens, self._random = prompts, tokens, random.Random(seed)
        self._expected: dict[str, str] = {}
        self._is_over, self._has_died = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self.counts = {
            "answers": 0,
            "left": 0,
            "refused": 0,
            "lost_to_kills": 0,
            "kills": 0,
            "different": 0,
            "failed": 0,
        }
        self._clients = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(_CLIENTS)]

    def __enter__(self) -> "ServedSoak":
        self._server.wait()
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join(_ANSWER_S)
        self._server.stop()

    def kill(self) -> None:
        """Kill the server in the middle of its answers, and start another."""
        self._has_died.set()
        self._server.kill()
        self._count("kills")
        self._server.start()
        self._server.wait()
        self._has_died.clear()

    def measured(self) -> dict[str, Any]:
        """The counts so far, and what the server has."""
        process = psutil.Process(self._server.process.pid)
        memory = round(process.memory_info().rss / 1e6, 1)
        return {f"served_{name}": number for name, number in self.counts.items()} | {
            "served_rss_mb": memory,
            "served_threads": process.num_threads(),
        }

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _ask_on(self) -> None:
        while not self._is_over.is_set():
            if self._has_died.is_set():
                sleep(_LOOK_S)
                continue
            try:
                self._ask()
            except (OSError, http.client.HTTPException) as error:
                sleep(2 * _LOOK_S)
                if not self._has_died.is_set():
                    told = error.read()[:500] if isinstance(error, urllib.error.HTTPError) else b""
                    print(f"a request failed: {type(error).__name__}: {error} {told!r}")
                self._count("lost_to_kills" if self._has_died.is_set() else "failed")

    def _ask(self) -> None:
        body = self._body()
        if self._random.random() < _REFUSED:
            self._ask_too_much(body)
            return
        plain = body | {"method": "plain"}
        key = json.dumps(plain, sort_keys=True)
        if key not in self._expected:
            self._expected[key] = self._text(plain)
        if self._random.random() < _WHOLE:
            found = self._text(body)
        else:
            last = self._random.randrange(8) if self._random.random() < _LEFT else None
            found = self._streamed(body, last)
            if last is not None:
                self._count("left")
                self._compare(found, self._expected[key][: len(found)], body)
                return
        self._count("answers")
        self._compare(found, self._expected[key], body)

    def _ask_too_much(self, body: dict[str, Any]) -> None:
        try:
            self._answer(body | {"top_p": 7}).close()
        except urllib.error.HTTPError as error:
            self._count("refused" if error.code == http.HTTPStatus.BAD_REQUEST else "failed")
        else:
            self._count("failed")

    def _answer(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=_ANSWER_S)

    def _compare(self, found: str, expected: str, body: dict[str, Any]) -> None:
        if found != expected:
            print(f"{body} differs: {found!r}, expected {expected!r}")
            self._count("different")

    def _body(self) -> dict[str, Any]:
        draw = self._random
        messages = [dict(message) for message in draw.choice(self._prompts)]
        body: dict[str, Any] = {
            "max_tokens": self._tokens,
            "temperature": draw.choice([0, 0.8]),
            "seed": draw.randrange(4),
        }
        body["method"] = draw.choice(["auto", "mirror", "serial", "lookup"])
        if draw.random() < _LONG:
            messages[-1]["content"] = " ".join([str(messages[-1]["content"])] * 8)
        elif draw.random() < _TOOLS:
            body["tools"] = [_TOOL]
        return body | {"messages": messages}

    def _text(self, body: dict[str, Any]) -> str:
        with self._answer(body) as answer:
            return _words(json.load(answer)["choices"][0]["message"])

    def _streamed(self, body: dict[str, Any], last: int | None) -> str:
        text, is_whole = "", False
        with self._answer(body | {"stream": True}) as answer:
            for place, line in enumerate(line for line in answer if line.startswith(b"data: ")):
                if is_whole := line.startswith(b"data: [DONE]"):
                    break
                choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
                text += _words(choices[0].get("delta") or {})
                if place == last:
                    return text
        if not is_whole:  # `http.client` takes a stream that breaks off for one that ends
            raise http.client.IncompleteRead(text.encode())
        return text


def _words(message: dict[str, Any]) -> str:
    """The text of an answer or of a chunk, its calls' names and arguments behind it."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(
        (call.get("name") or "") + (call.get("arguments") or "") for call in calls
    )
