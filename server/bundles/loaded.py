"""A bundle that is loaded: its seats, the queue before them, and the threads that answer and read prompts."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ContextLengthError
from mirrorsd.runtime import CancelToken, Chunk, GenerationConfig, MirrorPipeline
from mirrorsd.runtime.decoding.request import check_prompt_fits
from mirrorsd.runtime.sampling.noise import nth_seed
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.runtime.side_by_side import side_by_side
from mirrorsd.runtime.turns import ChunkStream
from mirrorsd.server.bundles.call_forms import IN_CHANNELS, Messages, Speech, read_form
from mirrorsd.server.bundles.fingerprint import fingerprint
from mirrorsd.server.bundles.reading import BrokenOff, Reading
from mirrorsd.server.bundles.threaded import Threaded
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import ServerSettings
from mirrorsd.texts.channels import has_channels
from mirrorsd.texts.messages import Message

_MEMORY = 0.9
_LONGEST_RETRY_S = 60


class Started(NamedTuple):
    """The request was understood and has a seat: its first step comes next."""


class Part(NamedTuple):
    """One chunk of a choice; choices count from 0."""

    number: int
    chunk: Chunk


Event = Started | Part
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be generated: token ids, and one config for each choice. `is_fresh` uses nothing that is cached."""

    token_ids: Sequence[int]
    configs: Sequence[GenerationConfig]
    cancel: CancelToken
    is_fresh: bool = False


class LoadedBundle:
    """A pipeline with seats for several users.

    Attributes:
        name: by which clients ask for it.
        tokenizer: the bundle's.
        chat_template: its text; empty without one.
        context: most tokens of prompt and answer together.
        fingerprint: see there.
        created: when it was loaded, in seconds since 1970.
    """

    def __init__(self, name: str, folder: Path, pipe: MirrorPipeline, settings: ServerSettings) -> None:
        self.name, self.folder, self.pipe = name, folder, pipe
        self.tokenizer = pipe.tokenizer
        template = folder / names.TOKENIZER_FOLDER / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.is_file() else ""
        self.context = pipe.manifest.target.context
        self.fingerprint = fingerprint(folder, pipe)
        self.created = int(time.time())
        self._speech: Speech | None = None
        self._running: set[Threaded[Event]] = set()
        self._settings = settings
        with suppress(ConfigError):  # said to whoever asks for a constrained text
            pipe.prepare_constraints()
        self._seats = pipe.seats(settings.seats)
        self._answering = ThreadPoolExecutor(settings.seats, thread_name_prefix=f"answer-{name}")
        self._reading = ThreadPoolExecutor(2, thread_name_prefix=f"read-{name}")
        self._seconds = 1.0
        self._tokens: set[CancelToken] = set()

    @property
    def bytes_per_seat(self) -> int:
        """What one conversation's caches take."""
        return self._seats.bytes_per_seat

    async def encode(self, **what: Any) -> list[int]:
        """Token ids of a prompt or messages, read on a thread: see `MirrorPipeline.encode`.

        Raises:
            ApiError: its template runs for ever.
            ContextLengthError: more than fits. What has too many bytes, tools included, is not read for that.
        """
        found = await self.read(what, lambda: self.pipe.encode(**what))
        check_prompt_fits(len(found), self.context)
        return found

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        **ends: bool,
    ) -> list[int]:
        """As `encode`, of a conversation; `ends` says how its text ends: see `BundleTokenizer.encode_chat`."""
        read = partial(self.tokenizer.encode_chat, messages, tools, variables, **ends)
        found = await self.read([messages, tools, variables], read)
        check_prompt_fits(len(found), self.context)
        return found

    async def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of a text, with those that the tokenizer adds by itself or without.

        Raises:
            ContextLengthError: a text of too many bytes.
        """
        return await self.read(text, lambda: self.tokenizer.encode(text, add_special_tokens=add_special))

    async def read(self, what: object, read: Callable[[], Found]) -> Found:
        """What `read` makes of a request's words, on a thread, where they are not too many.

        Raises:
            ApiError: it takes too long.
            ContextLengthError: the words have more bytes than the context can hold.
        """
        size = len(json.dumps(what, ensure_ascii=False, default=str).encode("utf-8", "replace"))
        if size > self.context * self._settings.limits.token_bytes:
            raise ContextLengthError.of(self.context, f"the prompt, tools included, has {size} bytes")
        loop, most_s = asyncio.get_running_loop(), self._settings.limits.read_s
        reading = Reading(read, most_s)
        found = self._reading.submit(reading.run)

        def watch() -> None:
            if not found.done():
                reading.check()
                loop.call_later(most_s, watch)

        loop.call_later(most_s, watch)
        try:
            return await asyncio.wrap_future(found)
        except BrokenOff:
            raise ApiError(400, f"Reading the prompt took over {most_s:g} seconds and was broken off.") from None

    async def speech(self) -> Speech:
        """How this bundle's model calls tools: read out of its chat template at the first request that has some.

        Raises:
            ApiError: its template runs for ever.
        """
        if self._speech is None:
            self._speech = await self.read("", self._read_speech)
        return self._speech

    def _read_speech(self) -> Speech:
        specials, eos_ids = self.tokenizer.special_tokens, self.pipe.manifest.tokens.eos_ids
        ends = [self.tokenizer.decode([token], skip_special_tokens=False) for token in eos_ids]

        def render(messages: Messages, tools: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
            return self.tokenizer.render_chat(messages, tools, add_generation_prompt=is_prompt)

        form = IN_CHANNELS if has_channels(specials) else read_form(render, ends)
        return Speech(form, specials, eos_ids, self.context)

    async def predict(self, text: str) -> list[int]:
        """Token ids of a text that an answer will probably contain."""
        return await self.tokenize(text) if text else []

    def plain_tokens_per_second(self, settings: Mapping[str, Any]) -> float | None:
        """What plain decoding has been measured to do, lately or by `tune`; None where nobody knows."""
        speed = self.pipe.engine.known.pairs[bool(settings.get("temperature"))].plain_speed
        return round(speed, 3) if speed else None

    @asynccontextmanager
    async def events(self, task: Task) -> AsyncIterator[AsyncIterator[Event | None]]:
        """Answer a task: within it, the events as they come, and None where there is silence.

        Raises:
            ApiError: too many are waiting already; within it, no seat came free in time.
        """
        self._admit()
        self._tokens.add(task.cancel)
        started = time.perf_counter()
        running = Threaded[Event](self._answering, lambda: self._answer(task, started), task.cancel.cancel)
        try:
            yield self._counted(running, task, started)
            self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * (time.perf_counter() - started)
        finally:
            running.leave()
            self._tokens.discard(task.cancel)
            self._running.discard(running)

    async def _counted(self, running: Threaded[Event], task: Task, asked: float) -> AsyncIterator[Event | None]:
        async for event in running.items(self._settings.limits.ping_s):
            if isinstance(event, Started):
                self._running.add(running)
            elif event is None and running not in self._running:
                _waited(task.configs[0], time.perf_counter() - asked)
            yield event

    @property
    def num_running(self) -> int:
        """Requests on a seat."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without one: none while one is free, though its request may wait for a beginning to be read."""
        return 0 if self._seats.num_free else len(self._tokens) - len(self._running)

    def cancel_all(self) -> None:
        """End every answer, running or waiting, within one step."""
        for token in list(self._tokens):
            token.cancel()

    def close(self) -> None:
        """End everything and release the devices; returns when the threads have ended."""
        self.cancel_all()
        self._answering.shutdown(wait=True, cancel_futures=True)
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._seats.close()
        self.pipe.close()

    def _admit(self) -> None:
        if len(self._tokens) < self._settings.seats + self._settings.queue:
            return
        rounds = ceil(len(self._tokens) / self._settings.seats)
        seconds = min(max(1, ceil(self._seconds * rounds)), _LONGEST_RETRY_S)
        raise ApiError(
            429,
            f"All {self._settings.seats} seats are taken and {self._settings.queue} requests wait. Try again later.",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    def _answer(self, task: Task, asked: float) -> Iterator[Event]:
        """On a thread of its own: there are as many threads as seats. One is free, or soon will be: see `_beside`."""
        left_s = max(0.0, self._settings.limits.request_s - (time.perf_counter() - asked))
        with ExitStack() as place:
            try:
                known = () if task.is_fresh else task.token_ids
                session = place.enter_context(self._seats.take(known, left_s, task.cancel))
            except TimeoutError:
                raise _no_seat() from None
            if task.is_fresh:
                session.forget()
            own, *more = [_waited(config, time.perf_counter() - asked) for config in task.configs]
            first = session.stream(token_ids=list(task.token_ids), config=own)
            yield Started()
            others = [partial(_begin, task.token_ids, config) for config in more]
            texts: list[Callable[[MirrorSession], ChunkStream[Chunk]]] = [lambda _: first, *others]
            beside = partial(self._beside, session)
            for index, chunk in side_by_side(session, texts, beside, lambda: not self.num_waiting):
                yield Part(index, chunk)

    def _beside(self, session: MirrorSession, most: int) -> list[AbstractContextManager[MirrorSession]]:
        """Seats for more choices of an answer: half of those that are free. Each is given back once somebody waits."""
        found: list[AbstractContextManager[MirrorSession]] = []
        num_sharing = self.pipe.engine.num_sharing(1 + most) - 1
        for _ in range(min(num_sharing, (self._seats.num_free + 1) // 2)):
            place = ExitStack()
            with place, suppress(TimeoutError):
                other = place.enter_context(self._seats.take(list(session.cached_token_ids), timeout_s=0.0))
                if other.follow(session):
                    found.append(_held(other, place.pop_all()))
        return found


def _waited(config: GenerationConfig, seconds: float) -> GenerationConfig:
    """The same request, which has waited so long of its time.

    Raises:
        ApiError: nothing of it is left.
    """
    if config.deadline_s is None:
        return config
    if seconds >= config.deadline_s:
        raise _no_seat()
    return config.with_overrides({"deadline_s": config.deadline_s - seconds})


def _no_seat() -> ApiError:
    message = "No seat came free in the time that an answer may take. Try again later."
    return ApiError(503, message, code="no_seat", headers={"Retry-After": "5"})


@contextmanager
def _held(session: MirrorSession, place: ExitStack) -> Iterator[MirrorSession]:
    with place:
        yield session


def _begin(token_ids: Sequence[int], config: GenerationConfig, session: MirrorSession) -> ChunkStream[Chunk]:
    return session.stream(token_ids=list(token_ids), config=config)


def seeded_configs(bundle: LoadedBundle, settings: Mapping[str, Any], count: int) -> list[GenerationConfig]:
    """One config for each choice: the same but for the seed, which the choice's number is hashed into.

    Raises:
        ConfigError: a setting that is not allowed.
    """
    first = GenerationConfig(**settings).resolve(bundle.pipe.manifest.generation)
    if first.seed is None:
        return [first] * count
    return [first.with_overrides({"seed": nth_seed(first.seed, index)}) for index in range(count)]


__all__ = ["Event", "LoadedBundle", "Part", "Started", "Task", "seeded_configs"]
