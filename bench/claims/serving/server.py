"""What serving costs: tokens per second over HTTP against in-process, gaps between chunks, several users.

    python bench/claims/serving/server.py storyteller.mirror --device-map cpu --output server.json

One client reads streams of the prompts in turn; the same texts are made in-process, alternating with it. Gaps are the
times between two chunks as the client sees them, against the median step of the same texts. Then several users ask at
once, each the next prompt when the last one is answered. Every text must be the in-process one.
"""

import json
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.server import Running, ServerSettings

_START_S = 300.0


class Streamed(NamedTuple):
    """One answer as a client saw it."""

    text: str
    num_tokens: int
    seconds: float
    gaps: list[float]


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=8, tokens=64)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    rows = []
    with serving(options, seats=1) as running:  # one seat, as the session in-process: neither has more cached
        rows.append(one_client(running, running.service.shelf.loaded["model"].pipe, prompts, options))
    with serving(options, seats=options.users) as running:
        rows.append(several_users(running, prompts, options))
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    runs.finish(report | {"ends": runs.ends(options), "rows": rows}, options.output)


@contextmanager
def serving(options: Any, seats: int) -> Iterator[Running]:
    """A server that has loaded the bundle."""
    settings = ServerSettings(port=0, device_map=options.device_map, seats=seats, queue=64)
    with Running({"model": options.bundle}, settings) as running:
        until = monotonic() + _START_S
        while running.service.status == "loading" and monotonic() < until:
            sleep(0.05)
        if running.service.status != "ok":
            raise SystemExit(f"the server is {running.service.status}: {running.service.failure}")
        yield running


def one_client(
    running: Running, pipe: MirrorPipeline, prompts: Sequence[runs.Messages], options: Any
) -> dict[str, Any]:
    """Speed over HTTP against in-process: the devices are the same, texts alternate."""
    config = runs.text_config(options).with_overrides({"method": options.method})
    shares, gaps, steps, speeds = [], [], [], []
    with pipe.session() as session:
        for repeat in range(options.repeats + 1):
            served, local, num_tokens = 0.0, 0.0, 0
            for number, messages in enumerate(prompts):
                answers: dict[bool, Any] = {}
                for is_served in (False, True)[:: 1 if (repeat + number) % 2 else -1]:
                    started = perf_counter()
                    if is_served:
                        answers[True] = ask(running.url, messages, options)
                        served += answers[True].seconds
                    else:
                        answers[False] = session.generate(messages=messages, config=config)
                        local += perf_counter() - started
                answer, result = answers[True], answers[False]
                if answer.text != result.text:
                    raise SystemExit("the server changed a text")
                num_tokens += answer.num_tokens
                if repeat:
                    gaps += answer.gaps
                    steps += [step.ended - step.started for step in result.steps]
            if repeat:  # the first one warms up
                shares.append(local / served)
                speeds.append(num_tokens / served)
    p99, step = float(np.percentile(gaps, 99)), median(steps)
    return {
        "users": 1,
        "tokens_per_second": round(median(speeds), 2),
        "server_to_library": round(median(shares), 4),
        "p99_gap_ms": round(1e3 * p99, 3),
        "step_ms": round(1e3 * step, 3),
        "p99_step_ms": round(1e3 * float(np.percentile(steps, 99)), 3),
        "p99_gap_in_steps": round(p99 / step, 2),
    }


def several_users(running: Running, prompts: Sequence[runs.Messages], options: Any) -> dict[str, Any]:
    """All tokens per second of several users at once against one."""
    speeds = {
        users: median(at_once(running, prompts, options, users) for _ in range(options.repeats))
        for users in (1, options.users)
    }
    gain = speeds[options.users] / speeds[1]
    bytes_per_seat = running.service.shelf.loaded["model"].bytes_per_seat
    return {
        "users": options.users,
        "tokens_per_second": round(speeds[options.users], 2),
        "gain_over_one_user": round(gain, 4),
        "mebibytes_per_seat": round(bytes_per_seat / (1 << 20), 2),
    }


def at_once(running: Running, prompts: Sequence[runs.Messages], options: Any, users: int) -> float:
    """Tokens per second of so many users together."""
    waiting, num_tokens = deque(prompts), deque[int]()

    def work() -> None:
        while waiting:
            try:
                messages = waiting.popleft()
            except IndexError:  # another one took the last
                return
            num_tokens.append(ask(running.url, messages, options).num_tokens)

    threads = [threading.Thread(target=work) for _ in range(users)]
    started = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(num_tokens) / (perf_counter() - started)


def ask(url: str, messages: runs.Messages, options: Any) -> Streamed:
    """One streamed answer."""
    body = {
        "messages": messages,
        "max_tokens": options.tokens,
        "temperature": 0,
        "stream": True,
        "method": options.method,
        "ignore_eos": options.ignore_eos,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    texts, times, num_tokens = [], [], 0
    started = perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            document = json.loads(line[6:])
            for choice in document["choices"]:
                if choice["delta"].get("content"):
                    texts.append(choice["delta"]["content"])
                    times.append(perf_counter())
            if document.get("usage"):
                num_tokens = document["usage"]["completion_tokens"]
    seconds = perf_counter() - started
    return Streamed("".join(texts), num_tokens, seconds, [b - a for a, b in pairwise(times)])


if __name__ == "__main__":
    main()
