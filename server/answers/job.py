"""One request for a text, from its settings to its choices: the way that all endpoints share."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from mirrorsd.runtime import CancelToken, GenerationResult
from mirrorsd.server.answers import figures
from mirrorsd.server.answers.choices import Choice, Delta
from mirrorsd.server.answers.settings_of import Settings
from mirrorsd.server.answers.shown import ShownTokens
from mirrorsd.server.answers.tools import Reader, ToolPlan
from mirrorsd.server.bundles.loaded import LoadedBundle, Part, Started, Task, seeded_configs
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import PING, Exchange
from mirrorsd.server.wire.fields import TextRequest

__all__ = ["Job", "Reader"]


@dataclass
class Job:
    """A request whose prompt has been read.

    Attributes:
        body: what was asked for.
        bundle: who answers.
        token_ids: of the prompt.
        settings: fields of `GenerationConfig`.
        num_choices: how many answers.
        tools: what tools demand.
        first_index: of the first choice: completions of several prompts count on.
    """

    service: Service
    body: TextRequest
    bundle: LoadedBundle
    token_ids: Sequence[int]
    settings: Settings
    num_choices: int = 1
    tools: ToolPlan = field(default_factory=ToolPlan)
    first_index: int = 0
    started: float = field(default_factory=perf_counter)

    def __post_init__(self) -> None:
        """Open every choice, in order: clients want to see all of them first."""
        skips = self.settings.get("skip_special_tokens", True)
        self.choices = [
            Choice(
                self.first_index + index,
                ShownTokens(self.bundle, self.token_ids, skip_special_tokens=skips),
                self.tools.reader(),
            )
            for index in range(self.num_choices)
        ]

    def begin_with(self, text: str) -> None:
        """Show a text before what every choice says: the prompt that a completion repeats."""
        for choice in self.choices:
            choice.echo = text

    @property
    def results(self) -> list[GenerationResult]:
        """Of the choices that have ended."""
        return [choice.result for choice in self.choices if choice.result is not None]

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncIterator[Delta | None]]:
        """Within it, what comes; first None as soon as the request has been accepted, and None in silence."""
        limits = self.service.settings.limits
        cancel = CancelToken()
        deadline = {"deadline_s": limits.request_s, "cancel": cancel}
        configs = seeded_configs(self.bundle, {**self.settings, **deadline}, self.num_choices)
        task = Task(token_ids=self.token_ids, configs=configs, cancel=cancel, is_fresh=not self.body.cache_prompt)
        async with self.bundle.events(task) as events:
            yield self._read(events)
        self.service.metrics.observe_results(self.bundle.name, self.results, self.bundle.pipe.manifest.accepted_length)

    async def _read(self, events: AsyncIterator[Started | Part | None]) -> AsyncIterator[Delta | None]:
        last = self.started
        async for event in events:
            if isinstance(event, Part):
                yield self.choices[event.number].take(event)
                now = perf_counter()
                self.service.metrics.observe_gap(now - last)
                last = now
            else:
                yield None

    async def finish(self) -> None:
        """Read everything, for an answer in one piece."""
        async with self.deltas() as deltas:
            async for _ in deltas:
                pass

    async def figures(self) -> dict[str, Any]:
        """`timings` and `mirror` of the answer."""
        speed = self.bundle.plain_tokens_per_second(self.settings)
        return {"timings": figures.timings(self.results), "mirror": figures.mirror(self.results, speed)}

    def extras(self, delta: Delta) -> dict[str, Any]:
        """What a chunk says beside its text, where it was asked for."""
        found: dict[str, Any] = {}
        if self.body.mirror_tokens and delta.pieces:
            found["mirror_tokens"] = [list(piece) for piece in delta.pieces]
        if self.body.mirror_timeline:
            found["mirror_timeline"] = [
                [device, name, round(1e3 * (start - self.started), 3), round(1e3 * (end - self.started), 3)]
                for device, name, start, end in delta.spans
            ]
        return found


async def ping(exchange: Exchange) -> None:
    """Show a client that waits in a stream that somebody is there."""
    await exchange.begin_stream()
    await exchange.frame(PING)
