"""Texts whose server dies: whether what the client has in the end is the undisturbed answer, byte for byte.

    python bench/claims/serving/killed.py pair.mirror --output killed.json

Two servers with caches of their own stand behind a front. Connections break off behind a chosen step: before the
first, behind the first, in the middle, before the last frame; or twice running. One server decodes plainly, the other
by mirror decoding. Kinds: chats, filters, penalties, stop strings, JSON by a schema, a call of a tool,
log-probabilities, several choices, completions of several prompts, responses; each greedy and sampled, as a stream and
whole. Each answer is compared with the one that a server of the same bundle gives undisturbed and plainly. All is one
process here; `kills.py` asks for the same of processes that are really killed.
"""

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice, product
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import httpx2

from mirrorsd.server import Running, ServerSettings
from mirrorsd.server.front import build_front
from mirrorsd.server.transport.resuming import FRAME_END, frames_of, read_mark

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_PLACE = {"type": "object", "properties": {"place": {"enum": ["river", "forest", "world"]}}, "required": ["place"]}
_TOOL = {"name": "go", "parameters": _PLACE}
_LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (_CHAT, _LONG),
    "filtered": (_CHAT, {**_LONG, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "penalised": (_CHAT, {**_LONG, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
    "stopped": (_CHAT, {"max_tokens": 80}),
    "schema": (
        _CHAT,
        {"max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _PLACE}}},
    ),
    "tool": (
        _CHAT,
        {"max_tokens": 120, "tool_choice": "required", "tools": [{"type": "function", "function": _TOOL}]},
    ),
    "logprobs": (_CHAT, {**_LONG, "logprobs": True, "top_logprobs": 2}),
    "choices": (_CHAT, {**_LONG, "max_tokens": 12, "n": 3}),
    "completions": (_COMPLETIONS, {**_LONG, "max_tokens": 8, "prompt": ["Once upon", "The fox"], "n": 2}),
    "responses": (_RESPONSES, {"max_output_tokens": 40, "ignore_eos": True, "input": "The fox"}),
}
PLACES = ("token 0", "token 1", "inside", "last", "twice")
"""Where a connection breaks off."""
_QUESTIONS = ("Tell me about the old heron.", "Where does the fox live?", "Who went to the river?")
_MEASURED = ("id", "created", "created_at", "completed_at", "item_id", "call_id", "timings", "mirror", "delta")
_START_S, _ANSWER_S = 120.0, 300.0
METHODS = ("plain", "mirror")
"""How the servers decode."""
_STOP = 6
"""Characters of a stop string: several tokens, so that a text may be cut within it."""


class Asked(NamedTuple):
    """One text to ask for."""

    kind: str
    place: str
    is_stream: bool
    temperature: float
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
        return body | {"temperature": self.temperature} | ({"seed": self.seed} if self.temperature else {})

    def stopping(self, client: httpx2.Client, server: str) -> dict[str, Any]:
        """What the body of a text that stops says besides: where, two thirds into what it would be otherwise."""
        if self.kind != "stopped":
            return {}
        whole = client.post(server + self.path, json=self.body() | {"method": "plain", "stream": False}).json()
        text = whole["choices"][0]["message"]["content"]
        place = 2 * len(text) // 3
        return {"stop": [text[place : place + _STOP] or "none", "zz"]}


LAST = 1 << 30
"""As so many marks: all but the one that ends the answer."""


class Marks:
    """Counts the marks of an answer up to where it shall break off.

    Attributes:
        silent: whether nothing was said before a mark, by mark.
    """

    def __init__(self, most: int | None) -> None:
        self.silent: list[bool] = []
        self._most, self._has_said = most, False

    def is_last(self, frame: bytes) -> bool:
        """Note a frame; whether the answer breaks off within it."""
        mark = read_mark(frame)
        if mark is not None:
            if self._most is not None and (len(self.silent) >= self._most or "is_done" in mark):
                return True
            self.silent.append(not self._has_said)
        self._has_said = mark is None
        return False


class Breaks:
    """Where the answers of servers break off.

    Attributes:
        planned: behind how many marks those that come next do.
        counts: how many have, by how the server decodes.
        silent: of the last answer, as in `Marks`.
    """

    def __init__(self) -> None:
        self.planned: list[int] = []
        self.counts = Counter[str]()
        self.silent: list[bool] = []

    def marks(self) -> Marks:
        """Those of an answer that begins."""
        marks = Marks(self.planned.pop(0) if self.planned else None)
        self.silent = marks.silent
        return marks


class Breaking(httpx2.AsyncHTTPTransport):
    """Brings requests to servers, each of which decodes in its way, and breaks their answers off."""

    def __init__(self, breaks: Breaks, methods: Mapping[int | None, str]) -> None:
        """Methods are by the servers' ports."""
        super().__init__()
        self._breaks, self._methods = breaks, methods

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Ask, and hand the answer on as far as it shall come."""
        method = self._methods[request.url.port]
        body = json.loads(request.content) | {"method": method}
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
        changed = httpx2.Request(request.method, request.url, headers=headers, json=body, extensions=request.extensions)
        answer = await super().handle_async_request(changed)
        if is_stream(answer.headers["content-type"]):
            answer.stream = _Cut(self._breaks, method, answer.stream)
        return answer


class _Cut(httpx2.AsyncByteStream):
    def __init__(self, breaks: Breaks, method: str, stream: Any) -> None:
        self._breaks, self._method, self._stream, self._marks = breaks, method, stream, breaks.marks()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for frame in frames_of(self._stream):
            if self._marks.is_last(frame):
                self._breaks.counts[self._method] += 1
                yield torn(frame)
                raise httpx2.ReadError("broken off")
            yield frame + FRAME_END

    async def aclose(self) -> None:
        await self._stream.aclose()


def main() -> int:
    """Ask, compare, print, write the report; 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    settings, breaks = ServerSettings(port=0, device_map=given.device_map, seats=1), Breaks()
    with ExitStack() as stack:
        servers = [stack.enter_context(Running({"killed": given.bundle}, settings)) for _ in METHODS]
        until = monotonic() + _START_S
        while any(server.service.status == "loading" for server in servers) and monotonic() < until:
            sleep(0.05)
        app = build_front([server.url for server in servers], settings)
        front = stack.enter_context(Running(app, settings))
        transport = Breaking(breaks, {server.port: method for server, method in zip(servers, METHODS, strict=True)})
        front.service.use(httpx2.AsyncClient(transport=transport, trust_env=False, timeout=60.0))
        report = compare(front.url, servers[0].url, breaks, list(islice(asked(), given.texts)))
    return tell(report, given.output)


def tell(report: dict[str, Any], output: Path | None) -> int:
    """Print a report, and write it where a file is named; 1 if an answer differs."""
    print(json.dumps(report, indent=1))
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["different"] > 0)


def asked() -> Iterator[Asked]:
    """All 200: kinds in all places, greedy and sampled, whole and as streams, in disorder; then with other seeds."""
    for seed in range(1, 1 << 30):
        texts = [
            Asked(kind, place, is_stream, temperature, seed)
            for place, is_stream, temperature, kind in product(PLACES, (True, False), (0.0, 1.0), KINDS)
        ]
        random.Random(seed).shuffle(texts)
        yield from texts


def breaks_of(place: str, silent: Sequence[bool], chosen: random.Random) -> list[int]:
    """Behind how many marks a server dies, and then the next one, in an answer whose marks said nothing at `silent`.

    In the middle it dies where text was held back, if it ever was: half a stop string, half a call of a tool.

    >>> breaks_of("token 0", [True] * 9, random.Random(1)), breaks_of("last", [True] * 9, random.Random(1))
    ([1], [1073741824])
    >>> breaks_of("twice", [True, False, False, True, False], random.Random(1))
    [4, 1]
    """
    inner = range(2, len(silent) - 1)
    inside = 1 + chosen.choice([number for number in inner if silent[number]] or inner or [0])
    return {"token 0": [1], "token 1": [2], "inside": [inside], "last": [LAST], "twice": [inside, 1]}[place]


def compare(front: str, server: str, breaks: Breaks, texts: Sequence[Asked]) -> dict[str, Any]:
    """Each text from a server, and through the front: undisturbed, then with answers that break off."""
    rows: list[tuple[Asked, int, bool]] = []
    chosen = random.Random(1)
    with httpx2.Client(trust_env=False, timeout=_ANSWER_S) as client:
        for text in texts:
            body, before = text.body() | text.stopping(client, server), breaks.counts.total()
            plain = said(client.post(server + text.path, json={**body, "method": "plain"}))
            undisturbed = said(client.post(front + text.path, json=body))
            breaks.planned = breaks_of(text.place, breaks.silent, chosen)
            found = said(client.post(front + text.path, json=body))
            breaks.planned = []
            rows.append((text, breaks.counts.total() - before, found == undisturbed == plain))
    return {
        "texts": len(rows),
        "equal": sum(is_equal for *_, is_equal in rows),
        "different": sum(not is_equal for *_, is_equal in rows),
        "broken_off": dict(breaks.counts),
        **{
            f"by_{name}": summed_up((str(getattr(text, name)), *row) for text, *row in rows)
            for name in Asked._fields[:4]
        },
        "of_them": [text._asdict() for text, _, is_equal in rows if not is_equal][:20],
    }


def summed_up(rows: Iterable[tuple[Any, ...]]) -> dict[str, dict[str, int]]:
    """Texts, those that are equal, and the breaks among them, by what stands first in a row."""
    found: dict[str, dict[str, int]] = {}
    for name, count, is_equal in rows:
        row = found.setdefault(name, {"texts": 0, "equal": 0, "broken_off": 0})
        for column, more in zip(row, (1, int(is_equal), count), strict=True):
            row[column] += more
    return found


def is_stream(kind: str) -> bool:
    """Whether an answer of this type comes in frames."""
    return kind.startswith("text/event-stream")


def torn(frame: bytes) -> bytes:
    """Half of a frame: what stands before it is not certain."""
    return frame[: len(frame) // 2]


def said(answer: httpx2.Response) -> Any:
    """Text, calls, log-probabilities, ends and usage of an answer, by choice, however it came."""
    if not is_stream(answer.headers["content-type"]):
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
