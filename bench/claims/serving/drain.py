"""Servers that are told to stop while users ask: how many requests fail.

    python bench/claims/serving/drain.py pair.mirror --users 8 --stops 10 --output drain.json

Three times: behind a front, whose two servers are stopped in turn; a server alone; a front alone. Each is a process
(`mirrorsd serve`, `mirrorsd front`) that gets SIGTERM, ends, and is started anew, again and again, while users ask one
thing after the other: streams and whole answers, greedy and sampled. A request is answered if all of its undisturbed
answer comes. It is turned away if nobody listens, or with a 503 that says when to ask again; it is dropped if its
connection closes without a word. Both are asked again, as clients do. Anything else has failed.
"""

import argparse
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import httpx2

from mirrorsd.bench import runs
from mirrorsd.bench.claims.serving.commands import Command
from mirrorsd.bench.claims.serving.killed import Asked, said

_ANSWER_S, _AGAIN_S = 300.0, 0.1
_TEXTS = [Asked("chat", "", number % 2 == 0, number // 2 % 2 * 1.0, number) for number in range(16)]


class Users:
    """Who asks one address all the while, and what became of it; use it as a context manager."""

    def __init__(self, url: str, expected: Sequence[tuple[dict[str, Any], Any]], count: int) -> None:
        """Texts are given as their bodies and undisturbed answers."""
        self.counts = Counter[str]()
        self._url, self._expected = url, expected
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask_on, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> "Users":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more have come.

        Raises:
            SystemExit: they do not come.
        """
        enough, until = self.counts["answered"] + count, monotonic() + _ANSWER_S
        while self.counts["answered"] < enough:
            if monotonic() > until:
                raise SystemExit(f"no answers come any more: {dict(self.counts)}")
            sleep(0.01)

    def _ask_on(self, number: int) -> None:
        with httpx2.Client(trust_env=False, timeout=_ANSWER_S) as client:
            while not self._is_over.is_set():
                body, expected = self._expected[number % len(self._expected)]
                became = self._ask(client, body, expected)
                with self._lock:
                    self.counts[became] += 1
                number += became == "answered"
                if became in ("turned away", "dropped"):
                    sleep(_AGAIN_S)

    def _ask(self, client: httpx2.Client, body: dict[str, Any], expected: Any) -> str:
        answer = None
        try:
            with client.stream("POST", self._url + _TEXTS[0].path, json=body) as answer:
                answer.read()
        except httpx2.ConnectError:
            return "turned away"
        except httpx2.TransportError as error:
            if answer is None:
                return "dropped"
            print(f"an answer broke off: {type(error).__name__}: {error}")
            return "failed"
        if answer.status_code == httpx2.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
            return "turned away"
        if (found := said(answer)) != expected:
            print(f"an answer differs: {found}, expected {expected}")
            return "failed"
        return "answered"


def main() -> int:
    """Ask, stop, print, write the report; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--stops", type=int, default=10, help="of each of the three")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--grace", default="10", help="seconds, as of `mirrorsd serve`")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack:
        serve = ("serve", f"killed={given.bundle}", "--device-map", given.device_map, "--grace", given.grace)
        servers = [stack.enter_context(Command(*serve)) for _ in range(2)]
        front = stack.enter_context(Command("front", *(server.url for server in servers), "--grace", given.grace))
        for process in (*servers, front):
            process.wait()
        expected = [(body, undisturbed(servers[0], body)) for body in bodies(given.tokens)]
        rows = [
            {"stopped": name, "users": given.users, **stopped(asked, ending, expected, given.users, given.stops)}
            for name, asked, ending in (
                ("servers behind a front", front, servers),
                ("a server alone", servers[0], servers[:1]),
                ("a front alone", front, [front]),
            )
        ]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    report = runs.header(given.bundle, device_map=given.device_map, tokens=given.tokens, grace_s=float(given.grace))
    runs.finish(report | {"ends": "ignored", "rows": rows}, given.output)
    return int(any(row["failed"] for row in rows))


def bodies(tokens: int) -> list[dict[str, Any]]:
    """Of the texts that users ask for."""
    return [text.body() | {"max_tokens": tokens} for text in _TEXTS]


def undisturbed(server: Command, body: dict[str, Any]) -> Any:
    """What a server says to it."""
    return said(httpx2.post(server.url + _TEXTS[0].path, json=body, trust_env=False, timeout=_ANSWER_S))


def stopped(
    asked: Command, ending: Sequence[Command], expected: Sequence[tuple[dict[str, Any], Any]], users: int, stops: int
) -> dict[str, Any]:
    """What became of the requests to one process while others, or that one, were stopped and started in turn."""
    seconds, statuses = [], Counter[int]()
    with Users(asked.url, expected, users) as asking:
        for number in range(stops):
            asking.wait_for_answers(users)
            process, started = ending[number % len(ending)], perf_counter()
            statuses[process.stop()] += 1
            seconds.append(perf_counter() - started)
            process.start()
            process.wait()
        asking.wait_for_answers(users)
    return {
        "stops": stops,
        **{name: asking.counts[name] for name in ("answered", "turned away", "dropped", "failed")},
        "longest_end_s": round(max(seconds), 2),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
    }


if __name__ == "__main__":
    raise SystemExit(main())
