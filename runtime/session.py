"""A session: one conversation's caches on the shared devices. Requests of a session reuse what it has cached."""

import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from mirrorsd.graphs.errors import GenerationError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.engine import Seat
from mirrorsd.runtime.generation import Chunk, GenerationResult, Stop, run_steps
from mirrorsd.runtime.generation_config import GenerationConfig, Speculations, resolve_generation
from mirrorsd.runtime.generation_stats import summarise
from mirrorsd.runtime.layouts import Layout
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.stopping import StopWatch
from mirrorsd.runtime.tokenization import BundleTokenizer, Message, read_ids


class MirrorSession:
    """Generates within one conversation. Thread-safe: its requests run one after another.

    Several sessions of a pipeline run at once: while one text is being verified, the draft works for another.
    """

    def __init__(
        self,
        seat: Seat,
        tokenizer: BundleTokenizer,
        manifest: Manifest,
        speculations: Speculations,
        layout: Layout,
        is_open: Callable[[], bool],
    ) -> None:
        self._seat, self._tokenizer, self._manifest = seat, tokenizer, manifest
        self._speculations, self._layout, self._is_pipeline_open = speculations, layout, is_open
        self._cancel = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False

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

        Closing the iterator stops the generation; the session stays usable.
        """
        settings = resolve_generation(config, overrides, self._manifest.generation)
        ids = self._encode(prompt, messages, token_ids)
        speculation = self._speculations.of(settings)
        return self._stream(Request(ids, settings, speculation, self._seat.context, self._cancel))

    def cancel(self) -> None:
        """Stop this session's current generation from any thread: it raises `Cancelled` within one step."""
        self._cancel.set()

    def close(self) -> None:
        """Stop, and release this session's caches."""
        self.cancel()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._seat.close()

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._lock:
            if self._is_closed or not self._is_pipeline_open():
                raise GenerationError("This session is closed: load the bundle again, or open a new session.")
            self._cancel.clear()
            started = perf_counter()
            driver = self._seat.driver(request, request.config.method)
            watch = StopWatch(
                request.config, self._manifest.tokens.eos_ids, self._tokenizer.decoder(request.tokens.tolist())
            )
            texts: list[str] = []
            try:
                for event in run_steps(driver, watch):
                    if isinstance(event, Stop):
                        yield Chunk("", (), self._result(request, driver.name, "".join(texts), event, started))
                    else:
                        texts.append(event.text)
                        yield event
            finally:
                driver.close()

    def _result(self, request: Request, method: str, text: str, stop: Stop, started: float) -> GenerationResult:
        failure = self._seat.draft_failure
        warnings = [f"The draft failed: {failure}."] if failure else []
        return GenerationResult(
            text=text,
            prompt_ids=request.tokens[: request.num_prompt].tolist(),
            token_ids=stop.token_ids,
            stop_reason=stop.reason,
            method=method,
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
