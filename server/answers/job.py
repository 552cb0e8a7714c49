"""One request for a text, from its settings to its choices: the way that all endpoints share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime import CancelToken, GenerationResult
from mirrorsd.server.answers import figures
from mirrorsd.server.answers.choices import Choice, Delta
from mirrorsd.server.answers.settings_of import Settings
from mirrorsd.server.answers.shown import ShownTokens
from mirrorsd.server.answers.tools import Reader, ToolPlan
from mirrorsd.server.bundles.loaded import LoadedBundle, Part, Started, Task, seeded_configs
from mirrorsd.server.errors import ApiError, not_now
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import PING, Exchange
from mirrorsd.server.transport.resuming import HEADER, Resumption, continued
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
        kind: how its id begins.
        id: of the answer, and `created`, when it began: those of an earlier answer that this one goes on with.
        configs: of the choices; their seeds are drawn.
    """

    service: Service
    exchange: Exchange
    body: TextRequest
    bundle: LoadedBundle
    token_ids: Sequence[int]
    settings: Settings
    num_choices: int = 1
    tools: ToolPlan = field(default_factory=ToolPlan)
    first_index: int = 0
    kind: str = "chatcmpl-"
    started: float = field(default_factory=perf_counter)

    def __post_init__(self) -> None:
        """Open every choice, in order: clients want to see all of them first.

        Raises:
            ApiError: it goes on with an answer that this server cannot go on with.
            ConfigError: a setting that is not allowed.
        """
        earlier = self.exchange.resumption or Resumption()
        if earlier.fingerprint not in (None, self.bundle.fingerprint):
            raise ApiError(
                409,
                f"The answer was begun where the system_fingerprint is {earlier.fingerprint}; here it is "
                f"{self.bundle.fingerprint}, so that the rest might be that of another text.",
                code="fingerprint_differs",
            )
        self.id, self.created = earlier.id or f"{self.kind}{uuid4().hex}", earlier.created or int(time())
        sent = [*continued(self.body.continue_from)[self.first_index :][: self.num_choices]]
        sent += [[]] * (self.num_choices - len(sent))
        configs = seeded_configs(self.bundle, self.settings, self.num_choices)
        self.configs = [
            config.with_overrides({"continue_from": ids}) for config, ids in zip(configs, sent, strict=True)
        ]
        self.choices = [
            Choice(
                index,
                ShownTokens(),
                self.tools.reader(f"{self.id}/{index}"),
                num_sent=len(ids),
                is_end_sent=index < earlier.num_ended,
            )
            for index, ids in enumerate(sent, self.first_index)
        ]

    def begin_with(self, text: str) -> None:
        """Show a text before what every choice says: the prompt that a completion repeats."""
        for choice in self.choices:
            choice.echo = text

    @property
    def is_begun(self) -> bool:
        """Whether the client has seen the answer's beginning already."""
        return self.exchange.resumption is not None and self.exchange.resumption.is_begun

    async def begin(self, opening: Sequence[dict[str, Any]] = ()) -> None:
        """Open the stream with these events, where the client has not seen them, and tell a front what it is about."""
        await self.exchange.begin_stream()
        for event in () if self.is_begun else opening:
            await self.exchange.event(event)
        await self.mark_beginning()

    async def mark_beginning(self, **more: int) -> None:
        """Tell a front what another server needs to know of this answer."""
        about = {"id": self.id, "created": self.created, "fingerprint": self.bundle.fingerprint}
        await self.exchange.mark(**about, seed=self.configs[0].seed, **more)

    async def mark(self, delta: Delta, **more: int) -> None:
        """Tell a front that all of this was sent, unless it knows, and the client that somebody is there."""
        if not delta.is_sent:
            num_ended = delta.choice + delta.is_last
            await self.exchange.mark(choice=delta.choice, ids=[*delta.ids], num_ended=num_ended, **more)
        await self.exchange.stay_heard()

    @property
    def results(self) -> list[GenerationResult]:
        """Of the choices that have ended."""
        return [choice.result for choice in self.choices if choice.result is not None]

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncIterator[Delta | None]]:
        """Within it, what comes; first None as soon as the request has been accepted, and None in silence."""
        if self.service.is_over:  # its prompt was being read meanwhile
            raise not_now("closing")
        limits = self.service.settings.limits
        cancel = CancelToken()
        deadline = {"deadline_s": limits.request_s, "cancel": cancel}
        configs = [config.with_overrides(deadline) for config in self.configs]
        task = Task(token_ids=self.token_ids, configs=configs, cancel=cancel, is_fresh=not self.body.cache_prompt)
        async with self.bundle.events(task) as events:
            yield self._read(events)
        self.service.metrics.observe_results(self.bundle.name, self.results, self.bundle.pipe.manifest.accepted_length)

    async def _read(self, events: AsyncIterator[Started | Part | None]) -> AsyncIterator[Delta | None]:
        last: float | None = None
        try:
            async for event in events:
                if isinstance(event, Part):
                    yield self.choices[event.number].take(event)
                    now = perf_counter()
                    if last is not None:
                        self.service.metrics.observe_gap(now - last)
                    last = now
                else:
                    yield None
        except ConfigError as error:
            raise self.tools.blamed(error) from error

    async def finish(self) -> None:
        """Read everything, for an answer in one piece."""
        is_opening = self.first_index == 0  # later prompts belong to an answer that has begun
        async with self.deltas() as deltas:
            async for delta in deltas:
                await self.tell_front(delta, is_opening=is_opening)
                is_opening = False

    async def tell_front(self, delta: Delta | None, *, is_opening: bool = False) -> None:
        """Tell a front what is certain of an answer in one piece; nothing happens where none asks."""
        if self.exchange.resumption is None:
            return
        if is_opening:
            await self.begin()
        if delta is not None:
            await self.mark(delta)
        elif not is_opening:
            await ping(self.exchange)

    async def figures(self, jobs: Sequence["Job"] = ()) -> dict[str, Any]:
        """`timings` and `mirror` of the answer, which these jobs have a part in each, or this one alone."""
        speed = self.bundle.plain_tokens_per_second(self.settings)
        results = [result for job in jobs or [self] for result in job.results]
        return {"timings": figures.timings(results), "mirror": figures.mirror(results, speed)}

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


def check_continued(body: TextRequest, num_choices: int) -> None:
    """Refuse ids of more choices than there are.

    Raises:
        ApiError: see there.
    """
    found = len(continued(body.continue_from))
    if found > num_choices:
        message = f"continue_from has ids of {found} choices; {num_choices} are asked for."
        raise ApiError(400, message, param="continue_from")


@asynccontextmanager
async def bundle_of(
    service: Service, exchange: Exchange, model: str | None, *, is_stream: bool = False
) -> AsyncIterator[LoadedBundle]:
    """The bundle that is asked for; a stream's client and a front hear that somebody is there while it is loaded.

    A front that asks without a body takes no stream: it is told soon that the bundle is being loaded.

    Raises:
        ApiError: see `Shelf.use`, as for other errors.
    """
    is_heard, ping_s = is_stream or exchange.resumption is not None, service.settings.limits.ping_s
    is_told = HEADER in exchange.request.headers and not is_heard
    async with AsyncExitStack() as stack:
        async with _pinging(exchange, ping_s if is_heard else None):
            waiting = asyncio.timeout(ping_s if is_told else None)
            try:
                async with waiting:
                    bundle = await stack.enter_async_context(service.shelf.use(model))
            except TimeoutError:
                if not waiting.expired():
                    raise
                raise not_now("loading") from None
        yield bundle


@asynccontextmanager
async def _pinging(exchange: Exchange, ping_s: float | None) -> AsyncIterator[None]:
    """Send a comment each time that so many seconds have passed; no comment is cut off at the end."""
    is_over = asyncio.Event()

    async def send() -> None:
        while not is_over.is_set():
            try:
                await asyncio.wait_for(is_over.wait(), ping_s)
            except TimeoutError:
                await ping(exchange)

    pinging = asyncio.create_task(send())
    try:
        yield
    finally:
        is_over.set()
        await pinging


async def ping(exchange: Exchange) -> None:
    """Show a client that waits in a stream that somebody is there."""
    await exchange.begin_stream()
    await exchange.frame(PING)
