"""A session: one conversation's caches on the shared devices. Requests of a session reuse what it has cached."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from mirrorsd.graphs.errors import GenerationError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.config import GenerationConfig, Speculations, resolve_generation
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.devices.layouts import Layout
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.generation import Stop, run_steps
from mirrorsd.runtime.reporting.results import Chunk, GenerationResult
from mirrorsd.runtime.reporting.stats import summarise
from mirrorsd.runtime.seated_decoder import SeatedDecoder
from mirrorsd.runtime.text.stopping import StopWatch
from mirrorsd.runtime.text.tokenizer import BundleTokenizer, Message, read_ids
from mirrorsd.runtime.turns import Turns

_CLOSE_S = 5.0


class MirrorSession:
    """Generates within one conversation. Thread-safe: its requests run one after another, in the order they came.

    A stream that is left half-read keeps nobody waiting: others run in between, and it goes on when it is read on.
    Several sessions of a pipeline run at once: while one text is being verified, the draft works for another. Close a
    session (it is a context manager) or drop it to release its caches.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: BundleTokenizer,
        manifest: Manifest,
        speculations: Speculations,
        layout: Layout,
    ) -> None:
        self._engine, self._tokenizer, self._manifest = engine, tokenizer, manifest
        self._speculations, self._layout = speculations, layout
        self._seat = engine.open_seat()
        self._turns = Turns()
        self._lock = threading.Lock()
        self._requests: weakref.WeakSet[Request] = weakref.WeakSet()
        self._release = weakref.finalize(self, self._seat.close)
        self._release.atexit = False

    def generate(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> GenerationResult:
        """Produce a text. Give exactly one of `prompt`, `messages` (through the chat template) and `token_ids`.

        `overrides` are fields of `GenerationConfig`.

        Raises:
            ConfigError: a setting is out of its range, or a sampling option is given for a text that is not sampled.
            ContextLengthError: the prompt does not fit into the bundle's context.
            GenerationError: an empty prompt, one of another type, or messages that the chat template does not take.
            Cancelled: `cancel` was called.
            DeviceError: the target's device failed (a failing draft only warns).
        """
        for chunk in self.stream(prompt, config, messages=messages, token_ids=token_ids, **overrides):
            if chunk.result is not None:
                return chunk.result
        raise AssertionError("unreachable: the last chunk carries the result")

    def stream(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """Like `generate`, but text comes as it is verified, a chunk per step; the last chunk carries the result.

        Closing the iterator stops the generation; the session stays usable. So it does if the iterator is left alone:
        its next requests run all the same, and this one goes on, with the same text, when it is read on.
        """
        settings = resolve_generation(config, overrides, self._manifest.generation)
        self._engine.check_usable()
        ids = self._encode(prompt, messages, token_ids)
        speculation = self._speculations.of(settings)
        request = Request(ids, settings, speculation, self._seat.context, threading.Event())
        with self._lock:
            self._requests.add(request)
        return self._stream(request)

    def cancel(self) -> None:
        """Stop what this session has been asked for so far, from any thread.

        The text that is being generated, those that wait and streams that have not begun raise `Cancelled`, within one
        step. Later requests are not affected.
        """
        with self._lock:
            requests = list(self._requests)
        for request in requests:
            request.cancel()
        self._turns.wake()
        self._seat.terminate()

    def close(self) -> None:
        """Stop, and release this session's caches. Streams that were left half-read end with an error if read on."""
        self.begin_to_close()
        self.finish_closing(_CLOSE_S)

    def begin_to_close(self) -> None:
        """Stop everything, without waiting for it."""
        if not self._engine.is_forked:
            self._turns.close()
            self.cancel()

    def finish_closing(self, timeout_s: float) -> None:
        """Release the caches once no step uses them, or after `timeout_s`: a device that hangs keeps its own."""
        if not self._engine.is_forked:
            self._turns.wait_until_free(timeout_s)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, request: Request) -> Iterator[Chunk]:
        started = perf_counter()
        place = SeatedDecoder(request, self._seat, self._turns)
        decoder = self._tokenizer.decoder(request.tokens.tolist())
        watch = StopWatch(request.config, self._manifest.tokens.eos_ids, decoder)
        texts: list[str] = []
        try:
            for event in run_steps(place, watch):
                if isinstance(event, Stop):
                    yield Chunk("", (), self._result(request, place, "".join(texts), event, started))
                else:
                    texts.append(event.text)
                    yield event
        finally:
            place.close()

    def _result(
        self, request: Request, place: "SeatedDecoder", text: str, stop: Stop, started: float
    ) -> GenerationResult:
        failure = place.draft_failure
        warnings = [f"The draft failed: {failure}."] if failure else []
        return GenerationResult(
            text=text,
            prompt_ids=request.tokens[: request.num_prompt].tolist(),
            token_ids=stop.token_ids,
            stop_reason=stop.reason,
            method=place.name,
            device_map=self._layout.device_map.name,
            layout=self._layout.name,
            seed=request.config.seed,
            stats=summarise(request, started, perf_counter(), warnings),
            spans=tuple(request.ledger.spans),
            steps=tuple(request.steps),
        )

    def _encode(
        self, prompt: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None
    ) -> list[int]:
        given = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
        found = [name for name, value in given.items() if value is not None]
        if len(found) != 1:
            raise GenerationError(
                f"Give exactly one of prompt, messages and token_ids; found {' and '.join(found) or 'none of them'}."
            )
        if prompt is not None:
            return self._tokenizer.encode(prompt)
        if messages is not None:
            return self._tokenizer.encode_chat(messages)
        return read_ids(token_ids, self._manifest.target.shape.vocab_size)
