"""Texts whose server dies: whether what the client has in the end is the undisturbed answer, byte for byte.

    python bench/claims/serving/killed.py pair.mirror --texts 200 --output killed.json

Two servers with caches of their own stand behind a front. Connections break off behind a chosen step: before the
first, behind the first, in the middle, before the last frame; or twice running. One server decodes plainly, the other
by mirror decoding. Kinds: greedy and sampled chats, filters, penalties, stop strings, JSON by a schema, a call of a
tool, log-probabilities, several choices, completions of several prompts, responses; each as a stream and whole. Each
answer is compared with the one that a server of the same bundle gives undisturbed and plainly. Processes that are
really killed are in the tests of the front.
"""

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import cycle, islice, product
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import httpx2

from mirrorsd.server import Running, ServerSettings
from mirrorsd.server.front import build_front

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_PLACE = {"type": "object", "properties": {"place": {"enum": ["river", "forest", "world"]}}, "required": ["place"]}
_TOOL = {"name": "go", "parameters": _PLACE}
_SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (_CHAT, {"temperature": 0, "max_tokens": 40, "ignore_eos": True}),
    "sampled": (_CHAT, _SAMPLED),
    "filtered": (_CHAT, {**_SAMPLED, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "penalised": (_CHAT, {**_SAMPLED, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
    "stopped": (_CHAT, {"temperature": 1.0, "max_tokens": 80, "stop": ["e ", "the", "on", "zz"]}),
    "schema": (
        _CHAT,
        {
            **{"temperature": 1.0, "max_tokens": 80},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _PLACE}},
        },
    ),
    "tool": (
        _CHAT,
        {
            **{"temperature": 1.0, "max_tokens": 120, "tool_choice": "required"},
            "tools": [{"type": "function", "function": _TOOL}],
        },
    ),
    "logprobs": (_CHAT, {**_SAMPLED, "logprobs": True, "top_logprobs": 2}),
    "choices": (_CHAT, {**_SAMPLED, "max_tokens": 12, "n": 3}),
    "completions": (_COMPLETIONS, {**_SAMPLED, "max_tokens": 8, "prompt": ["Once upon", "The fox"], "n": 2}),
    "responses": (_RESPONSES, {"temperature": 1.0, "max_output_tokens": 40, "ignore_eos": True, "input": "The fox"}),
}
PLACES = ("token 0", "token 1", "inside", "last", "twice")
"""Where a connection breaks off."""
_QUESTIONS = ("Tell me about the old heron.", "Where does the fox live?", "Who went to the river?")
_MEASURED = ("id", "created", "created_at", "completed_at", "item_id", "call_id", "timings", "mirror", "delta")
_START_S = 120


class Asked(NamedTuple):
    """One text to ask for."""

    kind: str
    place: str
    is_stream: bool
    seed: int

    @property
    def path(self) -> str:
        """Where it is asked for."""
        return KINDS[self.kind][0]

    def body(self) -> dict[str, Any]:
        """How it is asked for."""
        body: dict[str, Any] = {"model": "killed", "stream": self.is_stream, **KINDS[self.kind][1]}
        if self.path == _CHAT:
            body["messages"] = [{"role": "user", "content": _QUESTIONS[self.seed % len(_QUESTIONS)]}]
            body["stream_options"] = {"include_usage": True}
        return body | ({"seed": self.seed} if body["temperature"] else {})


class Breaking(httpx2.AsyncHTTPTransport):
    """Brings requests to servers, and breaks their answers off behind so many marks; each server decodes in its way."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks: list[int] = []
        self.num_marks = self.num_broken = 0
        self._methods = cycle(("plain", "mirror"))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Ask, and hand the answer on as far as it shall come."""
        body = json.loads(request.content) | {"method": next(self._methods)}
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
        changed = httpx2.Request(request.method, request.url, headers=headers, json=body, extensions=request.extensions)
        answer = await super().handle_async_request(changed)
        answer.stream = _Cut(self, answer.stream, self.breaks.pop(0) if self.breaks else None)
        return answer


class _Cut(httpx2.AsyncByteStream):
    def __init__(self, owner: Breaking, stream: Any, most: int | None) -> None:
        self._owner, self._stream, self._most = owner, stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for piece in self._stream:
            for part in re.split(rb"(?<=\n\n)", piece):
                is_mark = part.startswith(b": mirrorsd ")
                if self._most is not None and count >= self._most and is_mark:
                    self._owner.num_broken += 1
                    yield part[: len(part) // 2]  # a torn mark: what stands before it is not certain
                    raise httpx2.ReadError("broken off")
                count += is_mark
                yield part
        self._owner.num_marks = count

    async def aclose(self) -> None:
        await self._stream.aclose()


def main() -> int:
    """Ask, compare, print, write the report; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=int, default=220)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    settings = ServerSettings(port=0, device_map=given.device_map, seats=1)
    with ExitStack() as stack:
        servers = [stack.enter_context(Running({"killed": given.bundle}, settings)) for _ in range(2)]
        until = monotonic() + _START_S
        while any(server.service.status == "loading" for server in servers) and monotonic() < until:
            sleep(0.05)
        app = build_front([server.url for server in servers], settings)
        front = stack.enter_context(Running(app, settings))
        transport = Breaking()
        front.service.use(httpx2.AsyncClient(transport=transport, trust_env=False, timeout=60.0))
        report = compare(front.url, servers[0].url, transport, list(islice(asked(), given.texts)))
    print(json.dumps(report, indent=1))
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["different"] > 0)


def asked() -> Iterator[Asked]:
    """All kinds in all places, whole and as streams; then again with other seeds."""
    for seed in range(1, 1 << 30):
        for place, is_stream, kind in product(PLACES, (True, False), KINDS):
            yield Asked(kind, place, is_stream, seed)


def compare(front: str, server: str, transport: Breaking, texts: list[Asked]) -> dict[str, Any]:
    """Each text through the front, whose servers die, and undisturbed."""
    different: list[Asked] = []
    counts, chosen = Counter[str](), random.Random(1)
    with httpx2.Client(trust_env=False, timeout=120.0) as client:
        for text in texts:
            plain = said(client.post(server + text.path, json={**text.body(), "method": "plain"}))
            client.post(front + text.path, json=text.body())  # how many marks it has
            marks, before = max(2, transport.num_marks), transport.num_broken
            inside = chosen.randrange(2, marks) if marks > 2 else 1
            transport.breaks = {
                **{"token 0": [1], "token 1": [2], "inside": [inside], "last": [marks - 1]},
                "twice": [inside, 1],
            }[text.place]
            found = said(client.post(front + text.path, json=text.body()))
            transport.breaks = []
            counts[text.place] += transport.num_broken - before
            if found != plain:
                different.append(text)
    kinds = {kind: sum(text.kind == kind for text in texts) for kind in KINDS}
    return {
        "texts": len(texts),
        "equal": len(texts) - len(different),
        "different": len(different),
        "broken_off": dict(counts),
        "kinds": kinds,
        "of_them": [text._asdict() for text in different[:20]],
    }


def said(answer: httpx2.Response) -> Any:
    """Text, calls, log-probabilities, ends and usage of an answer, by choice, however it came."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, without_measures(answer.json())
    found: dict[Any, Any] = {"frames": []}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            found["frames"] += [line] if line.startswith("data: ") else []
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            mine: dict[str, Any] = found.setdefault(choice["index"], defaultdict(str))
            delta = choice.get("delta", {})
            mine["text"] += delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls", ()):
                mine["calls"] += json.dumps(call.get("function"))
            mine["logprobs"] += json.dumps((choice.get("logprobs") or {}).get("content") or "")
            mine["reason"] = choice["finish_reason"] or mine["reason"]
        kept = {name: value for name, value in event.items() if name in ("usage", "response", "error")}
        found["frames"] += [without_measures(kept)] if any(kept.values()) else []
        found["heads"] = found.get("heads", set()) | {str((event.get("id"), event.get("created")))}
        found["deltas"] = found.get("deltas", "") + (event["delta"] if isinstance(event.get("delta"), str) else "")
    found["heads"] = len(found["heads"])
    for mine in found.values():
        if isinstance(mine, defaultdict):
            mine["logprobs"] = mine["logprobs"].replace('""', "").replace("][", ", ")
    return answer.status_code, found


def without_measures(value: Any) -> Any:
    """A document without names that are drawn and figures of speed; of usage the counts of tokens."""
    if isinstance(value, dict):
        kept = {name: without_measures(found) for name, found in value.items() if name not in _MEASURED}
        return {name: found for name, found in kept.items() if not name.endswith("_details")}
    return [without_measures(found) for found in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
