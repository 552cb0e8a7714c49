"""What one client's requests can do to the others: the longest silence in their streams, and memory that stays taken.

    python bench/claims/serving/attacks.py storyteller.mirror --device-map cpu --output attacks.json

A server is started, and one client reads streams without end. Meanwhile every attack is sent in turn, until so many
were sent as `--count` says. Gaps are between two chunks as the reader sees them; those without attacks stand beside
them. Memory is the server's resident set before the first attack and after the last.
"""

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

import psutil

from mirrorsd.bench import runs

_START_S, _ANSWER_S, _QUIET_S = 300.0, 120.0, 10.0
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LONG = 8 << 20
_LONG_PROMPTS = ("ids that fill the context",)


class Attack(NamedTuple):
    """A request that asks for much."""

    name: str
    path: str
    body: bytes


class Sent(NamedTuple):
    """What became of it."""

    name: str
    status: int
    seconds: float
    answer_bytes: int
    gap_s: float


class Reader:
    """A client that reads one stream after the other, and notes when chunks came."""

    def __init__(self, url: str) -> None:
        self._url, self._is_over = url, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def longest_gap(self, since: float) -> float:
        """Seconds between two chunks since then, the silence that goes on included."""
        times = [since, *(time for time in list(self.times) if time > since), perf_counter()]
        return max(b - a for a, b in pairwise(times))

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(_ANSWER_S)

    def _read(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 512, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._is_over.is_set():
            request = _request(self._url + _COMPLETIONS, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=_START_S) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self.times.append(perf_counter())
                    if self._is_over.is_set():
                        return


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.set_defaults(count=50)
    options = parser.parse_args()
    with serving(options) as (url, process):
        context = int(json.load(urllib.request.urlopen(f"{url}/props", timeout=_ANSWER_S))["context"])
        attacks = list(all_attacks(context))
        with Reader(url) as reader:
            _wait(lambda: len(reader.times) > 20, "the reader's first chunks")
            send(url, next(_long_prompts(context)), reader)  # both seats have been used from here on
            quiet = _quiet(reader)
            before = process.memory_info().rss
            sent = [send(url, attack, reader) for attack in islice(cycle(attacks), max(options.count, len(attacks)))]
            sleep(1.0)
            after = process.memory_info().rss
    for attack in sorted(sent, key=lambda attack: attack.gap_s):
        took = f"{attack.seconds:7.2f} s, gap {attack.gap_s:6.3f} s"
        print(f"{attack.name:34} {attack.status} {took}, {attack.answer_bytes} bytes")
    summary = {
        "attacks": len(sent),
        "longest_gap_s": max(attack.gap_s for attack in sent if attack.name not in _LONG_PROMPTS),
        "longest_gap_without_s": round(quiet, 3),
        "longest_gap_beside_long_prompts_s": max(attack.gap_s for attack in sent if attack.name in _LONG_PROMPTS),
        "rss_before_mib": before >> 20,
        "rss_after_mib": after >> 20,
        "rss_ratio": round(after / before, 4),
        "longest_refusal_bytes": max(attack.answer_bytes for attack in sent if attack.status >= 400),
        "statuses": sorted({attack.status for attack in sent}),
    }
    print(", ".join(f"{name} {value}" for name, value in summary.items()))
    report = runs.header(options.bundle, device_map=options.device_map) | {"summary": summary}
    runs.finish(report | {"rows": [attack._asdict() for attack in sent]}, options.output)


@contextmanager
def serving(options: Any) -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own, ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mirrorsd", "serve", str(options.bundle), "--port", str(port), "--quiet"]
    process = subprocess.Popen([*command, "--device-map", options.device_map], stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: process.poll() is not None or _is_ready(f"http://127.0.0.1:{port}/health"), "the server")
        if process.returncode is not None:
            raise SystemExit("the server does not start")
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False


def _wait(is_done: Any, what: str) -> None:
    until = monotonic() + _START_S
    while not is_done():
        if monotonic() > until:
            raise SystemExit(f"{what} did not come within {_START_S:g} seconds")
        sleep(0.05)


def _quiet(reader: Reader) -> float:
    since = perf_counter()
    sleep(_QUIET_S)
    return reader.longest_gap(since)


def _request(url: str, body: bytes) -> urllib.request.Request:
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})


def send(url: str, attack: Attack, reader: Reader) -> Sent:
    """Send an attack, and see how long the reader waits meanwhile."""
    started = perf_counter()
    try:
        with urllib.request.urlopen(_request(url + attack.path, attack.body), timeout=_ANSWER_S) as answer:
            status, size = answer.status, len(answer.read())
    except urllib.error.HTTPError as error:
        status, size = error.code, len(error.read())
    except OSError:  # hung up while the body was still being sent
        status, size = 0, 0
    seconds = perf_counter() - started
    sleep(0.3)
    return Sent(attack.name, status, round(seconds, 3), size, round(reader.longest_gap(started), 4))


def all_attacks(context: int) -> Iterator[Attack]:
    """Each of them; some ask for far too much, the others for as much as the context could hold."""
    yield from _too_much()
    yield from _long_prompts(context)
    yield from _at_the_bound(context)
    yield from _forms()


def _too_much() -> Iterator[Attack]:
    yield Attack("3.6 MB of tools", _CHAT, _chat(tools=[_tool(number, 800) for number in range(50)]))
    yield Attack("4 million ids", _COMPLETIONS, b'{"prompt": [' + b",".join([b"1"] * 4_000_000) + b"]}")
    yield Attack("8 MB of text", _COMPLETIONS, json.dumps({"prompt": "ab " * (_LONG // 3 - 99)}).encode())
    yield Attack("8 MB of lists", _COMPLETIONS, _filled(_LONG - 99, "[]"))
    yield Attack("8 MB of objects", _COMPLETIONS, _filled(_LONG - 99, "{}"))
    yield Attack("8 MB of keys", _CHAT, b"{" + b",".join(b'"%d":1' % n for n in range(600_000)) + b"}")


def _long_prompts(context: int) -> Iterator[Attack]:
    """Prompts that fill the context, which anybody may send: the target's passes over them are the others' gaps."""
    yield Attack("ids that fill the context", _COMPLETIONS, json.dumps({"prompt": [1] * (context - 9)}).encode())


def _at_the_bound(context: int) -> Iterator[Attack]:
    text = 15 * context
    yield Attack("text that may just be read", _COMPLETIONS, json.dumps({"prompt": "ab " * (text // 3)}).encode())
    yield Attack("a message that may just be read", _CHAT, _chat(messages=[_user("x" * text)]))
    yield Attack("tools that may just be read", _CHAT, _chat(tools=[_tool(0, text // 80)], tool_choice="required"))
    yield Attack("too many ids", _COMPLETIONS, json.dumps({"prompt": [1] * (5 * context)}).encode())
    yield Attack("many messages", _CHAT, _chat(messages=[_user("x")] * min(2048, context // 4)))
    most = 6 * 16 * context
    for name in ("[]", "{}", '"a"', "1", "[1]", '{"role":"user","content":"x"}'):
        yield Attack(f"a body of {name}", _COMPLETIONS, _filled(most, name))
    yield Attack(
        "a body of parts",
        _CHAT,
        _filled(most, '{"type":"text","text":"a b"}', "messages", '{"role":"user","content":['),
    )


def _forms() -> Iterator[Attack]:
    deep = b"[" * 200_000
    yield Attack("deep nesting", _CHAT, b'{"messages": ' + deep + b"}")
    yield Attack(
        "definitions that are no mapping", _CHAT, _chat(tools=[_function({"$defs": [1]})], tool_choice="required")
    )
    choices = [{"type": "object", "properties": {f"a{n}": {"type": "string"}}} for n in range(900)]
    yield Attack("900 alternatives", _CHAT, _form({"anyOf": choices}))
    yield Attack("a large divisor", _CHAT, _form({"type": "integer", "multipleOf": 100_000}))
    yield Attack("a larger divisor", _CHAT, _form({"type": "integer", "multipleOf": 1_000_003}))
    patterns = {f"p{n}": {"type": "string", "pattern": f"[a-z]{{1,50}}{n}"} for n in range(900)}
    yield Attack("900 patterns", _CHAT, _form({"type": "object", "properties": patterns}))
    yield Attack("an expression of 3,000 brackets", _CHAT, _form({"type": "string", "pattern": "(" * 3000}))
    regex = {"type": "regex", "regex": ".*" * 500 + "x"}
    yield Attack("an expression of 500 stars", _CHAT, _chat(response_format=regex, max_tokens=4))
    grammar = {"type": "grammar", "grammar": "start: " + ' | "b"' * 9000}
    yield Attack("a grammar that is none", _CHAT, _chat(response_format=grammar, max_tokens=4))


def _chat(**more: Any) -> bytes:
    return json.dumps({"messages": [_user("Hello")], "max_tokens": 2, **more}).encode()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _form(schema: dict[str, Any]) -> bytes:
    return _chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}}, max_tokens=4)


def _tool(number: int, count: int) -> dict[str, Any]:
    properties = {f"p{place}": {"type": "string", "description": "x" * 40} for place in range(count)}
    return _function({"type": "object", "properties": properties}, f"f{number}")


def _function(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _filled(size: int, piece: str, field: str = "prompt", opening: str = "") -> bytes:
    """A body of about `size` bytes, in which a field is a list of nothing but this piece."""
    pieces = ",".join([piece] * (size // (len(piece) + 1)))
    closing = "]}" if opening else ""
    return f'{{"{field}": [{opening}{pieces}{closing}]}}'.encode()


if __name__ == "__main__":
    main()
