"""A fleet of PCs that is not there: how many PCs so many users need, and what failures cost. By simulation.

    python bench/claims/serving/fleet.py --prompts question.jsonl --output fleet.json
    python bench/claims/serving/fleet.py --speeds 1:12,4:30,8:42 --users 100

Users think, ask, wait and read. A PC writes the texts of its users together, at the speeds that were measured for so
many (`company.py`). Ray Serve's own policy says how many PCs are wanted; a PC takes its time to load. PCs die at
random: their texts go on elsewhere after being verified there, or begin anew where `--no-front` says so.
Where Ray is not installed its documented formula stands in, and the report says so.
"""

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

Policy = Callable[[int, float], float]
_TICK_S = 1.0
_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated. Times in seconds, lengths and speeds in tokens.

    Attributes:
        users: who think, ask and wait.
        think_s: mean time between an answer and the next question.
        speeds: tokens per second of a PC in all, by the number of its texts.
        reading: tokens of a prompt that a PC reads in a second; as many of a text that it goes on with.
        seats: texts that a PC writes at once.
        most: PCs there are.
        load_s: from the wish for a PC to its first text.
        up_s, down_s: how long more, or fewer, PCs must be wanted.
        hours_to_failure: mean time until a PC dies.
        has_front: whether texts outlive their PC.
        seconds: how long.
    """

    users: int
    think_s: float = 60.0
    speeds: Sequence[tuple[int, float]] = ((1, 177.0), (4, 324.0), (8, 472.0))
    reading: float = 2000.0
    seats: int = 8
    most: int = 1 << 20
    load_s: float = 20.0
    up_s: float = 30.0
    down_s: float = 600.0
    hours_to_failure: float = 24.0
    has_front: bool = True
    seconds: float = 3600.0

    def speed(self, count: int) -> float:
        """Tokens per second of each of so many texts.

        >>> Fleet(users=1).speed(1), Fleet(users=1).speed(8), Fleet(users=1, speeds=((1, 100.0), (3, 200.0))).speed(2)
        (177.0, 59.0, 75.0)
        """
        before = max((point for point in self.speeds if point[0] <= count), default=self.speeds[0])
        after = min((point for point in self.speeds if point[0] >= count), default=self.speeds[-1])
        width = after[0] - before[0]
        share = (count - before[0]) / width if width > 0 else 0.0
        return (before[1] + share * (after[1] - before[1])) / count


@dataclass(eq=False)
class Text:
    """One answer on its way; `left` counts tokens, those of its prompt in tokens of writing."""

    asked: float
    prompt: int
    length: int
    left: float = 0.0
    is_hit: bool = False


@dataclass(eq=False)
class Computer:
    """One PC; it writes from `ready` on."""

    ready: float
    dies: float
    texts: list[Text] = field(default_factory=list)


class Simulation:
    """Steps through time: a second is short beside an answer, and long beside nothing that is asked here."""

    def __init__(self, fleet: Fleet, lengths: Sequence[tuple[int, int]], policy: Policy, seed: int = 1) -> None:
        self._fleet, self._lengths, self._policy = fleet, lengths, policy
        self._random = random.Random(seed)
        self._computers = [self._new(0.0) for _ in range(max(1, min(fleet.most, fleet.users // 200)))]
        self._asking = [(self._think(), user) for user in range(fleet.users)]
        heapq.heapify(self._asking)
        self._waiting: list[Text] = []
        self._wanted_since: float | None = None
        self._unwanted_since: float | None = None
        self.waits: list[float] = []
        self.rates: list[float] = []
        self.counts: list[int] = []
        self.num_hit = self.num_died = 0

    def run(self) -> dict[str, Any]:
        """The figures behind the first quarter of the time, in which the fleet grows."""
        steps = int(self._fleet.seconds / _TICK_S)
        for step in range(steps):
            now = step * _TICK_S
            self._arrive(now)
            self._fail(now)
            self._seat(now)
            self._write(now)
            self._scale(now)
            if step == steps // 4:
                self.waits, self.rates, self.counts = [], [], []
        waits, rates = sorted(self.waits), sorted(self.rates)
        return {
            "users": self._fleet.users,
            "answers": len(waits),
            "pcs_mean": round(mean(self.counts), 1),
            "pcs_most": max(self.counts),
            "wait_p50_s": _part(waits, 0.5),
            "wait_p99_s": _part(waits, 0.99),
            "tokens_per_second_p50": _part(rates, 0.5),
            "tokens_per_second_p1": _part(rates, 0.01),
            "pcs_died": self.num_died,
            "answers_interrupted": self.num_hit,
        }

    def _think(self) -> float:
        return self._random.expovariate(1 / self._fleet.think_s)

    def _new(self, now: float) -> Computer:
        ready = now + (self._fleet.load_s if now else 0.0)
        return Computer(ready, ready + self._random.expovariate(1 / (3600 * self._fleet.hours_to_failure)))

    def _arrive(self, now: float) -> None:
        while self._asking and self._asking[0][0] <= now:
            asked, _ = heapq.heappop(self._asking)
            prompt, length = self._random.choice(self._lengths)
            text = Text(asked, prompt, length)
            text.left = length + prompt * self._fleet.speed(1) / self._fleet.reading
            self._waiting.append(text)

    def _fail(self, now: float) -> None:
        fleet = self._fleet
        for computer in [one for one in self._computers if one.dies <= now]:
            self._computers.remove(computer)
            self.num_died += 1
            for text in computer.texts:
                self.num_hit += not text.is_hit
                text.is_hit = True
                written = max(0.0, text.length - text.left) if fleet.has_front else 0.0
                again = (text.prompt + written) * fleet.speed(1) / fleet.reading
                text.left = text.length - written + again
            self._waiting[:0] = computer.texts

    def _seat(self, now: float) -> None:
        free = [(len(one.texts), number) for number, one in enumerate(self._computers) if one.ready <= now]
        heapq.heapify(free)
        while self._waiting and free and free[0][0] < self._fleet.seats:
            count, number = heapq.heappop(free)
            text = self._waiting.pop(0)
            self._computers[number].texts.append(text)
            if not text.is_hit:
                self.waits.append(now - text.asked)
            heapq.heappush(free, (count + 1, number))

    def _write(self, now: float) -> None:
        for computer in self._computers:
            if computer.texts:
                done = _TICK_S * self._fleet.speed(len(computer.texts))
                for text in computer.texts:
                    text.left -= done
                for text in [one for one in computer.texts if one.left <= 0]:
                    computer.texts.remove(text)
                    ended = now + _TICK_S + text.left / max(done, 1e-9)
                    self.rates.append(text.length / max(ended - text.asked, 1e-3))
                    heapq.heappush(self._asking, (ended + self._think(), id(text)))

    def _scale(self, now: float) -> None:
        fleet, count = self._fleet, len(self._computers)
        ongoing = len(self._waiting) + sum(len(one.texts) for one in self._computers)
        wanted = min(fleet.most, max(1, math.ceil(self._policy(max(count, 1), ongoing))))
        self._wanted_since = (self._wanted_since or now) if wanted > count else None
        self._unwanted_since = (self._unwanted_since or now) if wanted < count else None
        if self._wanted_since is not None and now - self._wanted_since >= fleet.up_s:
            self._computers += [self._new(now or 1e-9) for _ in range(wanted - count)]
        elif self._unwanted_since is not None and now - self._unwanted_since >= fleet.down_s:
            idle = [one for one in self._computers if not one.texts][: count - wanted]
            self._computers = [one for one in self._computers if one not in idle]
        self.counts.append(len(self._computers))


def _part(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else 0.0


def policy_of(target: float) -> tuple[str, Policy]:
    """Ray Serve's own default policy for so many requests a replica, or what its pages say that it computes."""
    try:
        from ray.serve._private.common import DeploymentID
        from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy as policy
        from ray.serve.config import AutoscalingConfig, AutoscalingContext
    except ImportError:
        return "its documented formula", lambda count, ongoing: ongoing / target
    config = AutoscalingConfig(min_replicas=1, max_replicas=1 << 20, target_ongoing_requests=target)

    def own(count: int, ongoing: float) -> float:
        about = {"deployment_id": DeploymentID("r"), "deployment_name": "r", "app_name": "r", "running_replicas": []}
        counts = {"current_num_replicas": count, "target_num_replicas": count, "total_num_requests": ongoing}
        bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 1 << 20, "policy_state": {}}
        names = ("total_queued_requests", "aggregated_metrics", "raw_metrics", "last_scale_up_time")
        open_ones = dict.fromkeys((*names, "last_scale_down_time", "current_time"))
        return float(policy(AutoscalingContext(**about, **counts, **bounds, **open_ones, config=config))[0])

    return "Ray Serve's own", own


def lengths_of(path: Path | None, answer: float, seed: int = 1) -> list[tuple[int, int]]:
    """Tokens of prompts, by their bytes, and of answers, which are as spread as those of chats: some are far longer."""
    chosen = random.Random(seed)
    prompts = [400] * 80
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [len(json.loads(line)["turns"][0].encode()) for line in lines if line.strip()]
    sigma = 0.8
    answers = [chosen.lognormvariate(math.log(answer) - sigma**2 / 2, sigma) for _ in prompts]
    return [
        (max(1, round(size / _BYTES_PER_TOKEN)), min(1024, max(1, round(length))))
        for size, length in zip(prompts, answers, strict=True)
    ]


def main() -> None:
    """Simulate, print a table, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="questions as JSON lines, of which the first turns are taken")
    parser.add_argument("--answer", type=float, default=200.0, help="mean tokens of an answer")
    parser.add_argument("--users", default="10,1000,100000")
    parser.add_argument("--speeds", default="1:177,4:324,8:472", help="tokens per second in all, by texts at once")
    parser.add_argument(
        "--think", type=float, default=60.0, help="mean seconds between an answer and the next question"
    )
    parser.add_argument("--hours-to-failure", type=float, default=24.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--no-front", action="store_true", help="texts begin anew where their PC dies")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    speeds = tuple((int(count), float(speed)) for count, speed in (pair.split(":") for pair in given.speeds.split(",")))
    name, policy = policy_of(target=speeds[-1][0] / 2)
    rows = []
    for users in map(int, given.users.split(",")):
        fleet = Fleet(
            users=users,
            speeds=speeds,
            seats=speeds[-1][0],
            think_s=given.think,
            hours_to_failure=given.hours_to_failure,
            has_front=not given.no_front,
            seconds=given.seconds,
        )
        rows.append(Simulation(fleet, lengths_of(given.prompts, given.answer), policy).run())
        print(json.dumps(rows[-1]), flush=True)
    report = {"policy": name, "speeds": speeds, "answer": given.answer, "think_s": given.think, "rows": rows}
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
