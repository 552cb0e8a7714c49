"""A session: one conversation's caches on the shared devices. Requests of a session reuse what it has cached."""

import threading
import weakref
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import NoReturn, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices import endings
from mirrorsd.devices.layouts import Layout
from mirrorsd.devices.saved_cache import SavedCache, origin_of, read_cache, write_cache
from mirrorsd.graphs.errors import BundleError, Cancelled, DeviceError, GenerationError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.backends.protocol import Kept
from mirrorsd.runtime.decoding.protocol import Stop
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.seat import Seat, SeatedDecoder
from mirrorsd.runtime.decoding.step import run_steps
from mirrorsd.runtime.draft.tree import longest_common_prefix
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.reporting.results import Chunk, GenerationResult, result_of
from mirrorsd.runtime.sampling.noise import nth_seed
from mirrorsd.runtime.side_by_side import side_by_side
from mirrorsd.runtime.turns import CacheTaker, ChunkStream, Turns, stream_in_thread
from mirrorsd.texts.config import GenerationConfig, GenerationOptions, Speculations, resolve_generation
from mirrorsd.texts.messages import Message
from mirrorsd.texts.request_reader import RequestReader
from mirrorsd.texts.setting_rules import checked, or_unset, require, whole
from mirrorsd.texts.shown_text import StopWatch
from mirrorsd.texts.speculation import check_head

_MOST_ANSWERS = 128


class MirrorSession:
    """Generates within one conversation. Thread-safe: its requests run one after another, in the order they came.

    A stream that is left half-read keeps nobody waiting: others run in between, and it goes on when it is read on.
    Several sessions of a pipeline run at once: while one text is being verified, the draft works for another. Close a
    session (it is a context manager) or drop it to release its caches.
    """

    def __init__(
        self, engine: Engine, reader: RequestReader, manifest: Manifest, speculations: Speculations, layout: Layout
    ) -> None:
        self._engine, self._reader, self._manifest = engine, reader, manifest
        self._speculations, self._layout = speculations, layout
        self._seat = Seat(engine)
        self._turns = Turns()
        self._lock = threading.RLock()  # a signal handler may ask for another text at any line
        self._requests: weakref.WeakSet[Request] = weakref.WeakSet()
        self._others: list[MirrorSession] = []
        self._release = weakref.finalize(self, self._seat.close)
        self._release.atexit = False
        engine.sessions.add(self)

    def generate(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Produce a text. Give exactly one of `prompt`, `messages` (through the chat template) and `token_ids`.

        `overrides` are fields of `GenerationConfig`.

        Raises:
            ConfigError: a setting is out of its range, or a sampling option is given for a text that is not sampled.
            ContextLengthError: the prompt does not fit into the bundle's context.
            GenerationError: an empty prompt, one of another type, or messages that the chat template does not take.
            Cancelled: `cancel` was called, here or on the token that was given.
            DeviceError: the target's device failed (a failing draft only warns).
        """
        with self._engine.target_worker.staying():  # a stream's caller has its thread back after each chunk
            return _last_of(self.stream(prompt, config, messages=messages, token_ids=token_ids, **overrides))

    def stream(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> ChunkStream[Chunk]:
        """Like `generate`, but text comes as it is verified, a chunk per step; the last chunk carries the result.

        Closing the iterator, from any thread, stops the generation; the session stays usable. So it does if the
        iterator is left alone: its next requests run all the same, and this one goes on, with the same text, when it is
        read on. Of two threads that read it at once the second gets a `GenerationError`, and the first its chunk.
        """
        settings = resolve_generation(config, dict(overrides), self._manifest.generation)
        return self._begin(self._request(settings, self._reader.read(prompt, messages, token_ids, settings)))

    def _begin(self, request: Request) -> ChunkStream[Chunk]:
        return ChunkStream(self._stream(request), request.cancel)

    def generate_several(
        self,
        count: int,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> list[GenerationResult]:
        """Several answers to one prompt, which is read once: the `i`-th is what its own seed alone would give.

        They are written at once where conversations share the target's passes, by sessions that this one keeps for it.
        Sampled answers have the seeds `nth_seed(seed, i)`; greedy ones are all the same.

        Raises:
            ConfigError: `count` is not 1 to 128; and what `generate` raises.
        """
        count = checked(whole(1, _MOST_ANSWERS), "generate_several", "count", count)
        settings = resolve_generation(config, dict(overrides), self._manifest.generation)
        allowed = "(), as each answer has a text of its own: use generate"
        require(not settings.continue_from, "GenerationConfig", "continue_from", settings.continue_from, allowed)
        ids = self._reader.read(prompt, messages, token_ids, settings)
        seeds = [None if settings.seed is None else nth_seed(settings.seed, number) for number in range(count)]
        requests = [self._request(replace(settings, seed=seed), ids) for seed in seeds]
        texts = [partial(MirrorSession._begin, request=request) for request in requests]
        return [chunk.result for _, chunk in side_by_side(self, texts, self._beside) if chunk.result is not None]

    def _beside(self, most: int) -> list[nullcontext["MirrorSession"]]:
        """Sessions of its own that go on from what this one has read, if they can share its passes."""
        num_others = self._engine.num_sharing(1 + most) - 1
        parts = self._engine, self._reader, self._manifest, self._speculations, self._layout
        with suppress(DeviceError):  # there is no room for it: fewer write at once
            while len(self._others) < num_others:
                self._others.append(MirrorSession(*parts))
        return [nullcontext(one) for one in self._others[:num_others] if not one._turns.is_taken and one.follow(self)]

    def follow(self, other: "MirrorSession", num_tokens: int | None = None) -> bool:
        """Take over what another session of the pipeline has cached, so that it is not read again.

        Args:
            other: it may be writing a text meanwhile.
            num_tokens: how many leading tokens, at most; None for all that it has cached.

        Returns:
            Whether that can be done: by a target on the processor, without recurrent layers. Else nothing changes.

        Raises:
            ConfigError: `num_tokens` is no whole number of 0 or more.
            DeviceError: the device failed.
            GenerationError: the session is closed, or the other one is of another pipeline.
        """
        if not isinstance(other, MirrorSession) or other._engine is not self._engine:
            raise GenerationError("A session can follow one of its own pipeline only.")
        with self._between_requests():
            return self._seat.follow(other._seat, checked(or_unset(whole(0)), "follow", "num_tokens", num_tokens))

    def astream(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """As `stream`, for `async for`: a thread of its own waits for the devices, the event loop never does.

        Closing the generator, or cancelling the task that reads it, stops the request within a step.
        """
        return stream_in_thread(
            partial(self.stream, prompt, config, messages=messages, token_ids=token_ids, **overrides)
        )

    async def agenerate(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """As `generate`, without keeping the event loop waiting."""
        async for chunk in self.astream(prompt, config, messages=messages, token_ids=token_ids, **overrides):
            if chunk.result is not None:
                return chunk.result
        raise AssertionError("unreachable: the last chunk carries the result")

    def encode(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Unpack[GenerationOptions],
    ) -> list[int]:
        """The ids that `generate` would read, for the same arguments.

        Raises:
            ConfigError: see `generate`.
            GenerationError: see `generate`.
        """
        settings = resolve_generation(config, dict(overrides), self._manifest.generation)
        return self._reader.read(prompt, messages, token_ids, settings)

    @property
    def heads(self) -> Collection[str]:
        """The kinds of heads that can run beside the target."""
        return self._seat.heads

    @property
    def cached_token_ids(self) -> list[int]:
        """The tokens that the target has cached of this conversation."""
        return [int(token) for token in self._seat.target.cached]

    @property
    def num_cached_tokens(self) -> int:
        """How many those are."""
        return len(self._seat.target.cached)

    def common_prefix(self, tokens: NDArray[np.int64], *, is_read: bool = True) -> int:
        """How many leading tokens of a prompt `[n]` are cached; not `is_read`: will be, once what is read now is."""
        return longest_common_prefix(self._seat.target.cached if is_read else self._seat.target.reading, tokens)

    def forget(self) -> None:
        """Let go of all that is cached of this conversation: the next prompt is read from its beginning.

        Raises:
            GenerationError: the session is closed.
        """
        with self._between_requests():
            self._seat.forget()

    def save_cache(self, path: str | Path) -> int:
        """Write what the target has cached of this conversation to a file, whole or not at all.

        Returns:
            The number of tokens. With all layers' keys and values a token takes kilobytes.

        Raises:
            DeviceError: the device's caches cannot be read.
            GenerationError: the session is closed.
            OSError: the file cannot be written.
        """
        with self._between_requests():
            tokens = self.cached_token_ids
            kept = self._seat.target.read_cache(len(tokens))
        write_cache(Path(path), SavedCache(tokens, kept.rows, kept.states), self._origin())
        return len(tokens)

    def load_cache(self, path: str | Path) -> int:
        """Take over what `save_cache` wrote, in place of what this conversation has cached.

        Returns:
            The number of tokens: a prompt that begins with them is not read again.

        Raises:
            BundleError: the file is missing, damaged, or of another bundle, device or version of the runtimes.
            DeviceError: the device's caches cannot be written.
            GenerationError: the session is closed.
        """
        with self._between_requests():
            nothing = self._seat.target.read_cache(0)
            saved = read_cache(Path(path), self._origin(), SavedCache([], nothing.rows, nothing.states))
            if len(saved.token_ids) > self._seat.context:
                raise BundleError(f"{path} holds {len(saved.token_ids)} tokens; the context is {self._seat.context}.")
            num_ids = self._manifest.target.shape.vocab_size
            outside = [token for token in saved.token_ids if not 0 <= token < num_ids]
            if outside:
                raise BundleError(f"{path} holds the token id {outside[0]}; the model's ids are 0 to {num_ids - 1}.")
            ids, kept = np.array(saved.token_ids, dtype=np.int64), Kept(len(saved.token_ids), saved.rows, saved.states)
            self._seat.target.write_cache(ids, kept)
        return len(saved.token_ids)

    def _origin(self) -> dict[str, str]:
        return origin_of(self._manifest, self._engine.target_model.describe())

    @contextmanager
    def _between_requests(self) -> Iterator[None]:
        """Have the caches, as a request has them for a step."""
        self._engine.check_usable()
        self._seat.check_reachable()
        taker = CacheTaker()
        try:
            self._turns.take(taker)
            yield
        finally:
            self._turns.retire(taker)

    def cancel(self) -> None:
        """Stop what this session has been asked for so far, from any thread.

        The text that is being generated, those that wait and streams that have not begun raise `Cancelled`, within one
        step. Later requests are not affected.
        """
        if self._engine.is_forked:
            return
        with self._lock:
            requests = list(self._requests)
        for request in requests:
            request.cancel()
        self._turns.end_unwanted(self._seat.terminate)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._turns.is_closed

    def close(self) -> None:
        """Stop, and release this session's caches. Streams that were left half-read end with an error if read on."""
        self.begin_to_close()
        self.finish_closing(endings.CLOSE_S)

    def begin_to_close(self) -> None:
        """Stop everything, without waiting for it."""
        if not self._engine.is_forked:
            self._turns.close()
            self.cancel()

    def finish_closing(self, timeout_s: float) -> None:
        """Release the caches once no step uses them, or after `timeout_s`: a device that hangs keeps its own."""
        if not self._engine.is_forked:
            for other in self._others:
                other.close()
            self._turns.wait_until_free(timeout_s)
            self._release()

    def __reduce__(self) -> NoReturn:
        endings.refuse_to_leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, settings: GenerationConfig, ids: Sequence[int]) -> Request:
        """A request that has not begun; its time runs."""
        self._engine.check_usable()
        check_head(settings.method, self._manifest, self._seat.heads)
        constraint = self._reader.constraints.compile(settings)
        speculation = self._speculations.of(settings)
        request = Request(ids, settings, speculation, self._seat.context, threading.Event(), constraint)
        with self._lock:
            self._requests.add(request)
        return request

    def _stream(self, request: Request) -> Generator[Chunk, None, None]:
        started = perf_counter()
        place = SeatedDecoder(request, self._seat, self._turns)
        skips = request.config.skip_special_tokens
        decoder = self._reader.tokenizer.decoder(request.tokens.tolist(), skip_special_tokens=skips)
        watch = StopWatch(request.config, self._manifest.tokens.eos_ids, decoder)
        chunks: list[Chunk] = []
        try:
            for event in run_steps(place, watch):
                if isinstance(event, Stop):
                    yield Chunk("", (), self._result(place, chunks, event.reason, started))
                else:
                    chunks.append(Chunk(event.text, event.tokens, spans=event.spans))
                    yield chunks[-1]
        except Cancelled as error:
            request.end_after(sum(len(chunk.tokens) for chunk in chunks))
            chunks.append(Chunk(watch.finish("cancelled").text, ()))  # what was held back
            error.result = self._result(place, chunks, "cancelled", started)
            endings.wait_for_end()
            raise
        finally:
            place.close()
            self._engine.text_ended(request.num_windows)

    def _result(
        self, place: SeatedDecoder, chunks: Sequence[Chunk], stop_reason: str, started: float
    ) -> GenerationResult:
        speed = self._engine.plain_tokens_per_second(place.request.config)
        return result_of(place, chunks, stop_reason, started, self._layout, speed)


def _last_of(stream: Iterator[Chunk]) -> GenerationResult:
    for chunk in stream:
        if chunk.result is not None:
            return chunk.result
    raise AssertionError("unreachable: the last chunk carries the result")
