"""Hours of mixed clients on one target: texts that differ, memory, threads and descriptors over time.

    python bench/claims/soak.py storyteller.mirror --minutes 120 --output soak.json

Eight sessions ask for texts of all methods and forms at once. In every round some are cancelled in the middle, some
sessions are closed and opened anew, and some save their caches and load them again. Every whole text is compared with
the plain one of the same settings alone, every cancelled one with its beginning. Now and then a run of the draft or a
pass fails, the disk is full or slow, and the clock jumps. In the last round a joint pass fails.

Meanwhile clients ask a server of the same bundle, which is killed and started anew (`serving/soak.py`; `--no-server`
leaves them out). `--kill-every 0` lets it live, so that its memory is watched too. Exit code 1: a text differed, or a
request failed without a fault of the soak's.
"""

import errno
import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import numpy as np
import psutil

from mirrorsd import Cancelled, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.bench.claims.serving.company import Asked, mixed, open_company
from mirrorsd.bench.claims.serving.soak import ServedSoak
from mirrorsd.devices.freed_memory import few_arenas
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget
from mirrorsd.runtime.session import MirrorSession

_CANCELLED, _REOPENED, _RELOADED = 0.1, 0.1, 0.2
"""Shares of requests that are cancelled, and behind which a session is opened anew or reads its cache from a file."""
_FAULTS = {"draft": 1e-3, "pass": 2e-4, "full disk": 0.05, "slow disk": 0.05, "clock": 0.01}
"""Shares of the draft's runs, of passes, of files and of looks at the clock that a fault befalls."""
_OWN = "a fault of the soak's"


class Soak:
    """The counts of a run."""

    def __init__(self, pipe: MirrorPipeline, folder: Path, seed: int) -> None:
        self.pipe, self.folder, self.random = pipe, folder, random.Random(seed)
        self.expected: dict[int, list[int]] = {}
        self.counts = {"texts": 0, "cancelled": 0, "different": 0, "failed": 0, "reopened": 0, "reloaded": 0}
        self.counts |= {"injected": 0, "lost_to_faults": 0}
        self.lock = threading.Lock()

    def count(self, name: str) -> None:
        """Count one."""
        with self.lock:
            self.counts[name] += 1

    def round(self, sessions: list[MirrorSession], asked: Sequence[Asked]) -> None:
        """Have every session answer its share of the requests, all sessions at once."""
        shares = [list(enumerate(asked))[place :: len(sessions)] for place in range(len(sessions))]
        threads = [
            threading.Thread(target=self.work, args=(sessions, place, share)) for place, share in enumerate(shares)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def work(self, sessions: list[MirrorSession], place: int, share: Sequence[tuple[int, Asked]]) -> None:
        """Answer requests one after another, and do to the session what clients do to theirs."""
        for number, one in share:
            try:
                self.answer(sessions[place], number, one)
                if self.random.random() < _RELOADED:
                    self.reload(sessions[place], self.folder / f"{place}.cache")
                if self.random.random() < _REOPENED:
                    sessions[place].close()
                    sessions[place] = self.pipe.session()
                    self.count("reopened")
            except Exception as error:
                is_own = _OWN in str(error)
                if not is_own:
                    print(f"request {number} failed: {type(error).__name__}: {error}")
                self.count("lost_to_faults" if is_own else "failed")

    def reload(self, session: MirrorSession, path: Path) -> None:
        """Save a session's cache and load it; a disk that is full leaves the file as it was, or none."""
        before = path.read_bytes() if path.exists() else b""
        try:
            session.save_cache(path)
        except OSError as error:
            if error.errno != errno.ENOSPC or (path.read_bytes() if path.exists() else b"") != before:
                raise
            self.count("lost_to_faults")
        else:
            session.load_cache(path)
            self.count("reloaded")

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Have the draft, passes, the disk and the clock fail now and then."""

        def failing(name: str, real: Callable[..., Any], fault: Callable[[], object]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                if self.random.random() < _FAULTS[name]:
                    self.count("injected")
                    fault()
                return real(*arguments, **named)

            return run

        def fail() -> None:
            raise DeviceError(_OWN)

        def fill() -> None:
            raise OSError(errno.ENOSPC, _OWN)

        clock, jumped = time.time, [0.0]
        now = failing(
            "clock", lambda: clock() + jumped[0], lambda: jumped.append(jumped.pop() + self.random.gauss(0, 3600))
        )
        replace = failing("slow disk", failing("full disk", os.replace, fill), lambda: sleep(0.5))
        with ExitStack() as stack:
            for owner, name, run in (
                (SlotDraft, "run", failing("draft", SlotDraft.run, fail)),
                (OnnxTarget, "run", failing("pass", OnnxTarget.run, fail)),
                (os, "replace", replace),
                (time, "time", now),
            ):
                stack.enter_context(mock.patch.object(owner, name, run))
            yield

    def answer(self, session: MirrorSession, number: int, one: Asked) -> None:
        """Ask for a text, perhaps cancel it in the middle, and compare it."""
        last = self.random.randrange(8) if self.random.random() < _CANCELLED else None
        tokens: list[int] = []
        try:
            for place, chunk in enumerate(session.stream(messages=one.prompt, config=one.config)):
                tokens += [token.id for token in chunk.tokens]
                if place == last:
                    session.cancel()
            expected = self.expected[number]
        except Cancelled:
            self.count("cancelled")
            expected = self.expected[number][: len(tokens)]
        self.count("texts")
        if tokens != expected:
            print(f"request {number} differs: {one.config}")
            self.count("different")


def main() -> None:
    """Run, print a line for every round, and write the report."""
    parser = runs.parser(__doc__, count=16, tokens=48)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--kill-every", type=int, default=5, metavar="ROUNDS", help="0 never kills the server")
    options = parser.parse_args()
    few_arenas()  # as in a server's process
    prompts = runs.spread_prompts(options.prompts, options.count)
    warnings.simplefilter("always")
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe,
    ):
        soak = Soak(pipe, Path(folder), options.seed)
        asked = list(islice(mixed(prompts, pipe.methods, options.tokens), 8 * len(pipe.methods)))
        for number, one in enumerate(asked):
            config = one.config.with_overrides({"method": "plain"})
            soak.expected[number] = pipe.generate(messages=one.prompt, config=config).token_ids
        sessions = [pipe.session() for _ in range(8)]
        open_company(pipe)
        with ExitStack() as stack:
            served = (
                None
                if options.no_server
                else stack.enter_context(
                    ServedSoak(options.bundle, prompts, options.device_map, options.tokens, options.seed)
                )
            )
            stack.enter_context(soak.faults())
            until = perf_counter() + 60 * options.minutes
            while not rows or perf_counter() < until:
                soak.round(sessions, asked)
                rows.append(measured(soak) | (served.measured() if served else {}))
                runs.print_rows(rows[-1:], tuple(rows[-1]))
                if served and options.kill_every and len(rows) % options.kill_every == 0:
                    served.kill()
        fail_next_pass(pipe)
        soak.round(sessions, asked)
        rows.append(
            measured(soak) | ({f"served_{name}": number for name, number in served.counts.items()} if served else {})
        )
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(asked), tokens=options.tokens)
    grown = {"growth": growth(rows[:-1])}
    if served and not options.kill_every:
        grown["served_growth"] = growth(rows[:-1], "served_rss_mb")
    report |= {"minutes": options.minutes, "kill_every": options.kill_every, "ends": runs.ends(options)} | grown
    runs.finish(report | {"rounds": rows}, options.output)
    print(rows[-1], *(f"{name}: {100 * share:.2f} % of memory" for name, share in grown.items()), sep="\n")
    if any(number for name, number in rows[-1].items() if name.endswith(("different", "failed"))):
        raise SystemExit(1)


def measured(soak: Soak) -> dict[str, Any]:
    """The counts so far, and what the process has."""
    process = psutil.Process()
    files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
    memory = round(process.memory_info().rss / 1e6, 1)
    return {**soak.counts, "rss_mb": memory, "threads": process.num_threads(), "files": files}


def growth(rows: Sequence[dict[str, Any]], name: str = "rss_mb") -> float:
    """By what share a process's memory grows from the end of the first tenth of rounds, a warm-up, to the last.

    It is that of a straight line through the rounds, as caches that are saved and joint passes make it go up and down.

    >>> growth([{"rss_mb": 50.0}, *({"rss_mb": 100.0 + size} for size in range(10))])
    0.09
    """
    after = [row[name] for row in rows[len(rows) // 10 :]]
    rise, start = np.polyfit(range(len(after)), after, 1) if len(after) > 1 else (0.0, after[0])
    return round(float(rise * (len(after) - 1) / start), 4)


def fail_next_pass(pipe: MirrorPipeline) -> None:
    """Have the next joint pass fail: from then on conversations take turns."""
    company = pipe.engine.target_worker.company
    assert company is not None  # `open_company` has seen it

    def fail(_: object) -> Any:
        raise DeviceError(_OWN)

    vars(company.batch)["run"] = fail


if __name__ == "__main__":
    main()
