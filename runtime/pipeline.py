"""The public pipeline: load a bundle, generate, stream, cancel."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from mirrorsd.device_maps import DeviceMap
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import GenerationError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.devices import choose_device_map
from mirrorsd.runtime.draft_session import DraftSession
from mirrorsd.runtime.engine import Engine, resolve_speculation
from mirrorsd.runtime.generation import Chunk, GenerationResult, Stop, run_steps
from mirrorsd.runtime.generation_config import GenerationConfig, SpeculationConfig
from mirrorsd.runtime.generation_stats import summarise
from mirrorsd.runtime.paced import PacedDraft, PacedTarget
from mirrorsd.runtime.request import Request
from mirrorsd.runtime.stopping import StopWatch
from mirrorsd.runtime.target_session import TargetSession
from mirrorsd.runtime.tokenization import BundleTokenizer, Message


class MirrorPipeline:
    """A loaded bundle on its two devices. Thread-safe: requests run one after another; `cancel` stops the current one.

    Attributes:
        manifest: what the bundle says about itself.
        device_map: the device map in use.
        speculation: how it speculates (never changes the text).
        placement: one line per part, saying what really runs where, and why this device map.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: BundleTokenizer,
        manifest: Manifest,
        device_map: DeviceMap,
        speculation: SpeculationConfig,
        placement: Sequence[str] = (),
    ) -> None:
        self.manifest, self.device_map, self.speculation = manifest, device_map, speculation
        self.placement = list(placement)
        self._engine, self._tokenizer = engine, tokenizer
        self._cancel = threading.Event()
        self._is_closed = False

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        device_map: str = "auto",
        speculation: Mapping[str, object] | None = None,
    ) -> Self:
        """Load a bundle.

        Args:
            bundle: the bundle's folder.
            device_map: name of a card, path of a card, or `auto`.
            speculation: values of `SpeculationConfig` to use instead of the card's own.

        Raises:
            BundleError: missing, damaged, of another schema, or unsafe.
            ConfigError: unknown device map or speculation setting.
            DeviceError: a device of the map is absent, or cannot run the bundle.
        """
        from mirrorsd.runtime.onnx_target import OnnxTarget
        from mirrorsd.runtime.openvino_draft import OpenVinoDraft

        folder = Path(bundle)
        manifest = read_bundle(folder)
        choice = choose_device_map(device_map)
        card = choice.device_map
        resolved = resolve_speculation(speculation_of(card), speculation or {})
        tokenizer = BundleTokenizer(folder)

        def make_target() -> TargetSession:
            target = OnnxTarget(folder, manifest.target, card.target)
            target.warm_up(1 + resolved.gamma)
            return PacedTarget(target, card.pace, manifest.target.shape.num_layers) if card.pace else target

        def make_draft() -> DraftSession:
            draft = OpenVinoDraft(folder, manifest.draft, card.draft)
            draft.warm_up()
            return PacedDraft(draft, card.pace) if card.pace else draft

        engine = Engine(
            make_target,
            make_draft,
            target_cores=card.target.cores,
            draft_cores=card.draft.cores,
        )
        placement = [*choice.reasons, engine.target_session.describe(), engine.draft_session.describe()]
        return cls(engine, tokenizer, manifest, card, resolved, placement)

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
            ConfigError: a setting is out of its range.
            ContextLengthError: the prompt does not fit into the bundle's context.
            GenerationError: empty prompt, or messages without a chat template.
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

        Closing the iterator stops the generation; the pipeline stays usable.
        """
        settings = (config or GenerationConfig()).with_overrides(overrides)
        ids = self._encode(prompt, messages, token_ids)
        request = Request(ids, settings, self.speculation, self._engine.context, self._cancel)
        return self._stream(request)

    def cancel(self) -> None:
        """Stop the current generation from any thread: it raises `Cancelled` within one step."""
        self._cancel.set()

    def close(self) -> None:
        """Release both devices. The pipeline cannot be used afterwards."""
        if not self._is_closed:
            self._is_closed = True
            self.cancel()
            with self._engine.lock:
                self._engine.close()

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
        with self._engine.lock:
            if self._is_closed:
                raise GenerationError("This pipeline is closed: load the bundle again.")
            self._cancel.clear()
            started = perf_counter()
            driver = self._engine.driver(request, request.config.method)
            watch = StopWatch(request.config, self.manifest.tokens.eos_ids, self._tokenizer.decoder())
            texts: list[str] = []
            try:
                for event in run_steps(driver, watch):
                    if isinstance(event, Stop):
                        result = self._result(request, driver.name, "".join(texts), event, started)
                        yield Chunk("", (), result)
                    else:
                        texts.append(event.text)
                        yield event
            finally:
                driver.close()

    def _result(self, request: Request, method: str, text: str, stop: Stop, started: float) -> GenerationResult:
        failure = self._engine.draft_failure
        warnings = [f"The draft failed: {failure}."] if failure else []
        return GenerationResult(
            text=text,
            token_ids=stop.token_ids,
            stop_reason=stop.reason,
            method=method,
            device_map=self.device_map.name,
            stats=summarise(request, started, perf_counter(), warnings),
            spans=tuple(request.ledger.spans),
            steps=tuple(request.steps),
        )

    def _encode(
        self, prompt: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None
    ) -> list[int]:
        given = [name for name, value in _named(prompt, messages, token_ids) if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise GenerationError(f"Give exactly one of prompt, messages and token_ids; found {found}.")
        if prompt is not None:
            if not prompt:
                raise GenerationError("The prompt is empty: give at least one character of text, or a message.")
            return self._tokenizer.encode(prompt)
        if messages is not None:
            return self._tokenizer.encode_chat(messages)
        ids = [int(token) for token in token_ids or ()]
        vocab_size = self.manifest.target.shape.vocab_size
        if any(not 0 <= token < vocab_size for token in ids):
            raise GenerationError(f"token_ids must lie in 0 .. {vocab_size - 1}.")
        return ids


def _named(*values: object) -> list[tuple[str, object]]:
    return list(zip(("prompt", "messages", "token_ids"), values, strict=True))


def speculation_of(card: DeviceMap) -> SpeculationConfig:
    """The device map's defaults as a `SpeculationConfig`."""
    defaults = card.speculation
    return SpeculationConfig(
        gamma=defaults.gamma,
        roots=defaults.roots,
        kappa=defaults.kappa,
        allocation=defaults.allocation,
        passes=defaults.passes,
    )
