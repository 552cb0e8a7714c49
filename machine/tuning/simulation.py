"""The real scheduler over recorded models in simulated time: seconds instead of minutes, for any pace.

Everything from the links to both devices up is the runtime's own. What is simulated:
two devices that take as long as a pace says, a queue before the draft's, and a host that takes `host_ms` for a step.
"""

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

import numpy as np

from mirrorsd.device_maps import Pace, interpolate
from mirrorsd.device_maps.pace import Curve
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.machine.tuning.replay import ReplayDraft, ReplayTarget, replayed_context
from mirrorsd.runtime.decoding.head import HeadLink
from mirrorsd.runtime.decoding.links import DraftLink, TargetLink
from mirrorsd.runtime.decoding.protocol import Decoder
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.seat import decoder_with, head_decoder, lookup_decoder
from mirrorsd.runtime.devices.company import Worker
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.ledger import Ledger, Overdue, Span, Ticket
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.reporting.stats import GenerationStats, summarise
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.texts.config import HEAD_METHODS, GenerationConfig, SpeculationConfig

Result = TypeVar("Result")
HOST_MS = 0.33
HEAD_HOST_MS = 0.3
ROUND_MS = ((4.0, 1.0), (24.0, 1.9), (32.0, 3.0))
"""Measured in paced runs on two cores: `host` of a mirror step; what a head takes beyond its pace (greedy; with noise
over 4,096 tokens 0.25 more); and by its rows what a draft round takes beyond its own, planning included (32 rows
take the core longer than the pace of `paced-laptop`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to replay on.

    Attributes:
        pace: times of the devices.
        speculation: how to speculate; windows are at most as long as the recording is deep.
        method: how to decode; the recording has the guesses of a head that is named.
        layers: which of the recorded exits are used; all by default.
        num_streams: streams of the draft that are used; all by default. 0 makes it an ordinary draft.
        takes_turns: whether draft and target compute on the same cores.
        host_ms: what the host takes for a step.
        round_ms: `[rows, ms]` points of what a draft round takes beyond its pace: masks, cache rows, waking up.
        scores: of the pair.
        begin: tells the scheduler what it knows before the first text; the pace's times without that.
    """

    pace: Pace
    speculation: SpeculationConfig
    method: str = "mirror"
    layers: tuple[int, ...] | None = None
    num_streams: int | None = None
    takes_turns: bool = False
    host_ms: float = HOST_MS
    round_ms: Curve = ROUND_MS
    scores: RootScores = field(default_factory=RootScores)
    begin: Callable[[Knowledge], object] | None = None


def simulate(recording: Recording, scenario: Scenario) -> list[GenerationStats]:
    """Replay every text; the statistics are those of a real run, in simulated time. Texts learn from those before."""
    return [summarise(request, 0.0, request.ledger.now()) for request in replay(recording, scenario)]


def replay(recording: Recording, scenario: Scenario) -> list[Request]:
    """As `simulate`: the finished requests, with all their steps.

    Raises:
        ConfigError: the method's head was not recorded, or nobody knows what it costs.
    """
    costed = [head.kind for head in recording.heads if head.read_share]
    if scenario.method in HEAD_METHODS and scenario.method not in costed:
        raise ConfigError(
            f"The recording has no {scenario.method} head of known cost (it has: {', '.join(costed) or 'none'}). "
            "Export the target with one, and record the bundle: `mirrorsd simulate BUNDLE --record FILE`."
        )
    known = Knowledge(root_scores=scenario.scores)
    if scenario.speculation.window == "worthwhile":
        known.target_ms = scenario.pace.target_ms
    if scenario.begin is not None:
        scenario.begin(known)
    return [_replay(recording, text, scenario, known) for text in recording.texts]


def tokens_per_second(stats: Sequence[GenerationStats]) -> float:
    """Tokens of all texts over the time of their steps."""
    tokens = sum(stat.tokens_per_step * stat.steps for stat in stats)
    return tokens / sum(stat.tokens_per_step * stat.steps / stat.tokens_per_second for stat in stats)


def _replay(recording: Recording, text: RecordedText, scenario: Scenario, known: Knowledge) -> Request:
    context = replayed_context(text)
    config = GenerationConfig(
        max_new_tokens=context - text.num_prompt,
        temperature=recording.temperature or None,
        seed=text.seed,
        ignore_eos=True,
    )
    speculation = replace(scenario.speculation, gamma=min(scenario.speculation.gamma, text.depth))
    request = Request(text.tokens[: text.num_prompt].tolist(), config, speculation, context, threading.Event())
    devices = Devices(scenario, recording.num_layers)
    request.ledger = devices.ledger
    request.chooser = ReplayChooser(config)
    decoder = _decoder(request, scenario, recording, text, devices, known)
    inflight = decoder.start()
    while request.num_tokens < len(text.tokens):
        inflight = decoder.step(inflight).inflight
    request.end_after(text.num_heads)
    return request


def _decoder(
    request: Request,
    scenario: Scenario,
    recording: Recording,
    text: RecordedText,
    devices: "Devices",
    known: Knowledge,
) -> Decoder:
    """The decoder of the scenario's method over one text, on simulated devices."""
    method = scenario.method
    layers = recording.layers if scenario.layers is None else scenario.layers
    session = ReplayTarget(recording, text, layers, devices.run_pass, devices.run_head)
    target = TargetLink(session, SimulatedWorker(devices, is_draft=False))
    if method in HEAD_METHODS:
        return head_decoder(request, target, HeadLink(method, target), known)
    if method == "lookup":
        return lookup_decoder(request, target, known)
    num_streams = text.draft_ids.shape[2] - 1 if scenario.num_streams is None else scenario.num_streams
    draft = DraftLink(
        Drafter(ReplayDraft(recording, text, num_streams, devices.run_round)),
        SimulatedWorker(devices, is_draft=True),
        inf,
        devices.ledger,
        takes_turns=scenario.takes_turns,
    )
    heads = [HeadLink(head.kind, target) for head in recording.heads if head.read_share]
    return decoder_with(request, method, target, draft, known, heads)


class Devices:
    """Simulated time: of the host, which waits for the target, and of the draft's device, which has a queue.

    Jobs of the draft run when the host's time has passed them. `ledger` reads the clock of whoever is working.
    """

    def __init__(self, scenario: Scenario, num_layers: int) -> None:
        self._pace, self._num_layers = scenario.pace, num_layers
        self._host_ms, self._round_ms = scenario.host_ms, scenario.round_ms
        self._host = self._draft = self._arrival = 0.0
        self._is_draft_working = False
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._num_posted = 0
        self.ledger = Ledger(lambda: self._draft if self._is_draft_working else max(self._host, self._arrival))

    def run_round(self, num_rows: int) -> None:
        """A round of the draft. Long ones are prefills, which cost nothing here."""
        if num_rows <= self._pace.draft_ms[-1][0] or num_rows <= 64:
            beyond = self._pace.transfer_ms + interpolate(self._round_ms, num_rows)
            self._draft += (interpolate(self._pace.draft_ms, num_rows) + beyond) / 1e3

    def run_pass(self, num_rows: int, reports: list[tuple[int, Callable[[], None]]]) -> None:
        """A pass of the target: exits report on the way, the draft works beside it, the host waits to its end."""
        start, self.ledger.pass_ends = self._host + self._host_ms / 1e3, inf
        pass_ms, exit_ms = interpolate(self._pace.target_ms, num_rows), self._pace.exit_ms
        mark = start
        for number, (layer, report) in enumerate(reports):
            reached = start + (pass_ms * layer / self._num_layers + number * exit_ms) / 1e3
            self._arrival = reached + exit_ms / 1e3
            self.ledger.spans.append(Span("target", "middle" if number else "prefix", mark, reached))
            self.ledger.spans.append(Span("target", "exit", reached, self._arrival))
            mark = self._arrival
            report()
        self.ledger.pass_ends = start + (pass_ms + len(reports) * exit_ms) / 1e3
        self.ledger.spans.append(Span("target", "suffix", mark, self.ledger.pass_ends))
        self._arrival = 0.0
        self._run_jobs(self.ledger.pass_ends)
        self._host = self.ledger.pass_ends

    def run_head(self, read_share: float, num_rows: int) -> None:
        """A head beside the target, after its pass; the host waits for it."""
        start = self._host
        self._host += (self._pace.head_ms(read_share, num_rows) + HEAD_HOST_MS) / 1e3
        self.ledger.spans.append(Span("target", "head", start, self._host))

    def post(self, job: Callable[[], object]) -> None:
        """Queue a job for the draft's device, at the time of whoever posts it."""
        self._num_posted += 1
        arrival = max(self._arrival, self.ledger.now())
        heapq.heappush(self._jobs, (arrival, self._num_posted, job))

    def has_waiting(self) -> bool:
        """Whether another job has arrived by now."""
        return bool(self._jobs) and self._jobs[0][0] <= self._draft

    def wait_for_draft(self) -> None:
        """Run all jobs while the host waits."""
        self._run_jobs(inf)
        self._host = max(self._host, self._draft)

    def _run_jobs(self, until: float) -> None:
        while self._jobs and max(self._jobs[0][0], self._draft) < until:
            arrival, _, job = heapq.heappop(self._jobs)
            self._draft = max(self._draft, arrival)
            self._is_draft_working = True
            job()
            self._is_draft_working = False


class SimulatedWorker(Worker):
    """A device's worker in simulated time, where the only text's jobs are at work.

    The target's jobs run at once, on the host's time, which waits for them. The draft's run beside it when that has
    passed them.
    """

    company = None

    def __init__(self, devices: Devices, *, is_draft: bool) -> None:
        self._devices, self._is_draft = devices, is_draft

    def submit(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = inf) -> Ticket[Result]:
        ticket: Ticket[Result] = Ticket()
        whole = partial(_finish, ticket, job)
        if self._is_draft:
            self._devices.post(whole)
        else:
            whole()
        return ticket

    def perform(
        self, job: Callable[[], Result], owner: object = None, overdue: Overdue | None = None
    ) -> Ticket[Result]:
        return self.submit(job, owner)

    def run(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = inf) -> Result:
        ticket = self.submit(job, owner)
        self.wait(ticket, deadline_s)
        return ticket.result()

    def wait(self, ticket: Ticket[Any], deadline_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        if not ticket.done():
            self._devices.wait_for_draft()
        return ticket.done()

    def has_waiting(self) -> bool:
        return self._devices.has_waiting()

    def chunk_rows(self, owner: object, start: int, most: int) -> int:
        """All: there is nobody else."""
        return most

    def running_seconds(self) -> float:
        """No job is ever late."""
        return 0.0

    def serves(self, owner: object) -> bool:
        """The host looks only when its jobs are done."""
        return False

    serves_others = serves


def _finish(ticket: Ticket[Result], job: Callable[[], Result]) -> None:
    ticket.finish(job())


class ReplayChooser(TokenChooser):
    """Ranks candidates as ever; the target's own choices are known, so nothing is drawn for them."""

    def __init__(self, config: GenerationConfig) -> None:
        super().__init__(config)
        self.needs_logits = False


def mean_of(stats: Sequence[GenerationStats], name: str) -> float:
    """A figure of the statistics, averaged with the steps as weights."""
    values: list[Any] = [getattr(stat, name) for stat in stats]
    return float(np.average(values, weights=[stat.steps for stat in stats]))


def shares_of(stats: Sequence[GenerationStats], name: str) -> dict[str, float]:
    """Shares by name of the statistics, averaged with the steps as weights; what a text lacks is 0 there."""
    found: list[dict[str, float]] = [getattr(stat, name) for stat in stats]
    steps = [stat.steps for stat in stats]
    names = sorted({key for shares in found for key in shares})
    return {
        key: round(float(np.average([shares.get(key, 0.0) for shares in found], weights=steps)), 4) for key in names
    }
