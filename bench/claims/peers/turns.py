"""Turns of a comparison: a process per runtime and model, one of them working at a time, on a quiet machine.

Owns: the processes, whose turn it is, which answers count. Does not own: who takes part (`ways.py`), what is kept
(`journal.py`).
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

from mirrorsd.bench.claims.peers.journal import Journal
from mirrorsd.bench.claims.peers.ways import PEERS, Entry
from mirrorsd.cli.bench.peers import LLAMA_CPP, Worker
from mirrorsd.graphs.errors import GenerationError

MOST_ATTEMPTS = 4
QUIET_SHARE = 0.15
"""Of a core: an answer is measured again where other processes used more."""
WARM_UP_TOKENS = 32
Request = dict[str, Any]


class Limits(NamedTuple):
    """How texts end: after `most` tokens, or with one of `ends`; without any the end of text is ignored.

    At a `temperature` above 0, tokens are drawn by `seed`.
    """

    most: int
    ends: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0

    def request(self, ids: Sequence[int], settings: dict[str, Any]) -> Request:
        """What a worker is asked for a text after `ids`."""
        found = {"ids": list(ids), "most": self.most, "ends": list(self.ends), "settings": settings}
        return found | ({"temperature": self.temperature, "seed": self.seed} if self.temperature else {})


class Contestant:
    """One way to decode: a worker with settings for its texts."""

    def __init__(self, entry: Entry, worker: Worker) -> None:
        self.name, self.runtime, self.worker = str(entry["name"]), str(entry["runtime"]), worker
        self.settings: dict[str, Any] = entry["settings"]

    def decode(self, ids: Sequence[int], limits: Limits) -> dict[str, Any]:
        """Decode after `ids`."""
        return self.worker.decode(limits.request(ids, self.settings))

    def decode_several(self, prompts: Sequence[Sequence[int]], limits: Limits, users: int) -> dict[str, Any]:
        """Decode after each of several, `users` at a time."""
        several = [limits.request(ids, self.settings) for ids in prompts]
        return self.worker.decode({"several": several, "users": users})


class Company:
    """All who take part and their processes, one per runtime, model and options of loading; closed at the end."""

    def __init__(self, entries: Sequence[Entry], cache: Path, threads: int) -> None:
        """Start them all at once, and leave out who does not start: `refused` says why."""
        self.refused: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}
        keys = [json.dumps([one["runtime"], one["model"], one.get("draft"), one["options"]]) for one in entries]
        for key, one in zip(keys, entries, strict=True):
            if key not in self._workers:
                self._workers[key] = start_worker(cache.resolve(), one, threads)
        failed: dict[str, str] = {}
        for key, worker in self._workers.items():
            try:
                found = worker.wait_until_ready()
            except GenerationError as error:
                failed[key] = str(error)
                continue
            self.versions |= {f"peers: {name}": found[name] for name in found if name == LLAMA_CPP}
        pairs = list(zip(keys, entries, strict=True))
        self.refused = {str(one["name"]): failed[key] for key, one in pairs if key in failed}
        self.contestants = [Contestant(one, self._workers[key]) for key, one in pairs if key not in failed]

    def leave_out(self, contestant: Contestant, error: GenerationError) -> None:
        """Go on without one."""
        print(f"{contestant.name} is left out: {error}", file=sys.stderr)
        self.refused[contestant.name] = str(error)
        self.contestants.remove(contestant)

    def __enter__(self) -> "Company":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()


def start_worker(cache: Path, entry: Entry, threads: int) -> Worker:
    """Start the process of a contestant: a runtime with a model."""
    name = str(entry["runtime"])
    python = cache / "env" / "bin" / "python" if name in PEERS else Path(sys.executable)
    draft = ["--draft", entry["draft"]] if entry.get("draft") else []
    words = [name, entry["model"], "--threads", str(threads), *draft, "--options", json.dumps(entry["options"])]
    return Worker(name, python, words)


def measure(
    company: Company, prompts: dict[str, list[int]], limits: Limits, journal: Journal, repeats: int, minutes: float
) -> None:
    """Let them take turns, who goes first rotating, until all have `repeats` answers or the time is over.

    What the journal holds already is not asked again. No prompt is begun after so many minutes.
    """
    *_, last = prompts.values()
    short = limits._replace(most=min(limits.most, WARM_UP_TOKENS))
    ask(company, company.contestants, lambda one: one.decode(last, short))
    deadline = perf_counter() + 60 * minutes
    for repeat in range(repeats):
        for number, (name, ids) in enumerate(prompts.items()):
            missing = [one for one in company.contestants if len(journal.of(one.name, name)) <= repeat]
            if missing and perf_counter() > deadline:
                return
            shift = (repeat + number) % max(1, len(missing))
            seeded = limits._replace(seed=limits.seed + number)
            ordered = (*missing[shift:], *missing[:shift])
            for contestant, answer in ask(company, ordered, partial(decode_alone, company, ids, seeded)):
                journal.add(contestant.name, name, answer)
            print(f"repeat {repeat + 1} of {repeats}, prompt {number + 1} of {len(prompts)}", file=sys.stderr)


def decode_alone(company: Company, ids: Sequence[int], limits: Limits, one: Contestant) -> dict[str, Any]:
    """An answer of one of them, on a quiet machine."""
    return undisturbed(company.contestants, lambda: one.decode(ids, limits))


def ask(
    company: Company, contestants: Sequence[Contestant], answer: Callable[[Contestant], dict[str, Any]]
) -> list[tuple[Contestant, dict[str, Any]]]:
    """One answer of each; who fails is left out from now on."""
    found = []
    for contestant in list(contestants):
        try:
            found.append((contestant, answer(contestant)))
        except GenerationError as error:
            company.leave_out(contestant, error)
    return found


def undisturbed(contestants: Sequence[Contestant], decode: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One answer during which other processes were quiet; after a few attempts the last one counts.

    Its `share` is how many cores the others used meanwhile.
    """
    for _ in range(MOST_ATTEMPTS):
        before, own, started = busy_seconds(), cpu_of_children(contestants), perf_counter()
        answer = decode()
        elapsed = perf_counter() - started
        share = (busy_seconds() - before - (cpu_of_children(contestants) - own)) / elapsed
        if share < QUIET_SHARE:
            break
        sleep(0.5)
    return answer | {"share": round(max(0.0, share), 3)}


def busy_seconds() -> float:
    """Seconds of processor time that this machine has used so far (Linux; 0 elsewhere)."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    ticks = [int(word) for word in stat.read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def cpu_of_children(contestants: Sequence[Contestant]) -> float:
    """Processor seconds of the contestants' processes so far, and of what they started (Linux; 0 elsewhere)."""
    sessions = {contestant.worker.pid for contestant in contestants}
    return sum(cpu_seconds(stat, sessions) for stat in Path("/proc").glob("[0-9]*/stat"))


def cpu_seconds(stat: Path, sessions: set[int]) -> float:
    """Processor seconds of a process, if it is of one of those sessions; each worker leads one."""
    try:
        words = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if int(words[3]) in sessions else 0.0
