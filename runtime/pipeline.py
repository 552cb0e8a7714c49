"""The public pipeline: load a bundle, generate, stream, cancel, open further sessions."""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mirrorsd.device_maps import DeviceMap
from mirrorsd.device_maps.card import SHARED
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.backends.paced import PacedDraftModel, PacedTargetModel
from mirrorsd.runtime.backends.protocol import DraftModel, TargetModel
from mirrorsd.runtime.config import GenerationConfig, SpeculationConfig, Speculations
from mirrorsd.runtime.devices.huge_pages import regions_now, use_huge_pages
from mirrorsd.runtime.devices.inventory import check_computes, choose_device_map
from mirrorsd.runtime.devices.layouts import Layout, choose_layout, target_thread_cores
from mirrorsd.runtime.engine import Engine, check_exits, resolve_speculation
from mirrorsd.runtime.policy.root_scores import RootScores
from mirrorsd.runtime.reporting.results import Chunk, GenerationResult
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.runtime.text.tokenizer import BundleTokenizer, Message
from mirrorsd.runtime.tuned import Tuned

if TYPE_CHECKING:
    from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
    from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel

_CLOSE_S = 5.0


class MirrorPipeline:
    """A loaded bundle on its two devices.

    `generate`, `stream` and `cancel` work on a session of the pipeline's own, one request at a time; `session` opens
    further ones that run beside it.

    Attributes:
        manifest: what the bundle says about itself.
        device_map: the device map in use, as its layout has it.
        speculation: how it speculates in greedy texts (never changes the text).
        sampled_speculation: the same in sampled texts.
        placement: why this device map, and one line per device saying what really runs where.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: BundleTokenizer,
        manifest: Manifest,
        layout: Layout,
        speculations: Speculations,
        placement: Sequence[str] = (),
    ) -> None:
        self.manifest, self._layout, self.device_map = manifest, layout, layout.device_map
        self.speculation, self.sampled_speculation = speculations
        self.placement = list(placement)
        self._engine, self._tokenizer = engine, tokenizer
        self._sessions: weakref.WeakSet[MirrorSession] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._own = self.session()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        device_map: str = "auto",
        speculation: Mapping[str, object] | None = None,
        use_tuned: bool = True,
        layout: str | None = None,
    ) -> Self:
        """Load a bundle.

        Args:
            bundle: the bundle's folder.
            device_map: name of a card, path of a card, or `auto`.
            speculation: values of `SpeculationConfig` to use instead of the card's own.
            use_tuned: start from what `mirrorsd tune` found, where it fits this machine.
            layout: one of the card's `layouts`; by default the one that was found fastest, else the card's first.

        Raises:
            BundleError: missing, damaged, of another schema, or unsafe.
            ConfigError: unknown device map or speculation setting, or a layout that the card does not permit.
            DeviceError: a device of the map is absent, or cannot run the bundle.
        """
        folder = Path(bundle)
        manifest = read_bundle(folder)
        choice = choose_device_map(device_map, dtype=manifest.target.shape.dtype)
        check_computes(choice.device_map, manifest.target.shape.dtype)
        tuned = Tuned.read(folder, choice.device_map) if use_tuned else None
        laid_out = choose_layout(choice.device_map, layout, tuned)
        found = tuned if tuned and tuned.layout == laid_out.name else None
        speculations = _resolve(choice.device_map, found, speculation or {})
        for one in speculations:
            check_exits(one, manifest.target)
        tokenizer = BundleTokenizer(folder)
        before = regions_now()
        engine = _start_engine(folder, manifest, laid_out, speculations.greedy)
        num_huge = use_huge_pages(before) if _wants_huge_pages(laid_out.device_map) else 0
        source = "tuned on this machine" if found else f"defaults of {choice.device_map.name}"
        engine.target_ms = laid_out.device_map.pace.target_ms if laid_out.device_map.pace else ()
        if tuned:
            engine.root_scores = RootScores.from_dict(tuned.root_scores)
        if found:
            engine.target_ms = found.target_ms or engine.target_ms
            engine.books.greedy.start_from(found.tokens_per_second, found.tokens_per_step)
            engine.books.sampled.start_from(found.sampled_tokens_per_second, found.sampled_tokens_per_step)
        pages = [f"huge pages: {num_huge >> 20} MiB"] if num_huge else []
        placement = [*choice.reasons, laid_out.reason, *engine.describe(), *pages, f"speculation: {source}"]
        return cls(engine, tokenizer, manifest, laid_out, speculations, placement)

    @property
    def layout(self) -> str:
        """How target and draft share the processor's cores (see `layouts`)."""
        return self._layout.name

    @property
    def engine(self) -> Engine:
        """The devices and their workers, for measuring them."""
        return self._engine

    def session(self, speculation: SpeculationConfig | None = None) -> MirrorSession:
        """Open a session with caches of its own; it shares the devices fairly with the others.

        Use it as a context manager, or close it, where many are opened. It keeps the pipeline's devices alive.

        Args:
            speculation: how this session speculates; the pipeline's own ways by default.

        Raises:
            GenerationError: the pipeline is closed.
            ConfigError: it wants exits that the bundle does not have.
        """
        check_exits(speculation or self.speculation, self.manifest.target)
        self._engine.check_usable()
        ways = Speculations(speculation or self.speculation, speculation or self.sampled_speculation)
        session = MirrorSession(self._engine, self._tokenizer, self.manifest, ways, self._layout)
        with self._lock:
            self._sessions.add(session)
        return session

    def generate(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> GenerationResult:
        """Produce a text: see `MirrorSession.generate`."""
        return self._own.generate(prompt, config, messages=messages, token_ids=token_ids, **overrides)

    def stream(
        self,
        prompt: str | None = None,
        config: GenerationConfig | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """Produce a text chunk by chunk: see `MirrorSession.stream`."""
        return self._own.stream(prompt, config, messages=messages, token_ids=token_ids, **overrides)

    def cancel(self) -> None:
        """Stop the pipeline's own session from any thread: it raises `Cancelled` within one step."""
        self._own.cancel()

    def close(self) -> None:
        """Stop all sessions and release both devices. The pipeline cannot be used afterwards.

        Returns within seconds whatever they are at: a device that hangs is left behind.
        """
        with self._lock:
            if not self._engine.is_open or self._engine.is_forked:
                return
            self._engine.is_open = False
            sessions = list(self._sessions)
        for session in sessions:
            session.begin_to_close()
        until = perf_counter() + _CLOSE_S
        for session in sessions:
            session.finish_closing(max(0.0, until - perf_counter()))
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


def speculation_of(card: DeviceMap) -> SpeculationConfig:
    """The device map's defaults as a `SpeculationConfig`."""
    defaults = card.speculation
    return SpeculationConfig(
        gamma=defaults.gamma,
        roots=defaults.roots,
        root_source=defaults.root_source,
        kappa=defaults.kappa,
        allocation=defaults.allocation,
        passes=defaults.passes,
        window=defaults.window,
    )


def _resolve(card: DeviceMap, tuned: Tuned | None, given: Mapping[str, object]) -> Speculations:
    """The card's settings, what was tuned on top of them, what the caller gives on top of both."""
    defaults = speculation_of(card)
    greedy = tuned.speculation if tuned else {}
    sampled = tuned.sampled_speculation or greedy if tuned else {}
    return Speculations(*(resolve_speculation(defaults, {**one, **given}) for one in (greedy, sampled)))


def _start_engine(folder: Path, manifest: Manifest, layout: Layout, speculation: SpeculationConfig) -> Engine:
    """Load both models on their workers, run each once, and set the pace if the card has one."""
    from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
    from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits

    card = layout.device_map

    def load_target() -> TargetModel:
        exits = OpenVinoExits(folder, manifest.target, card.exit) if card.exit.device != "target" else None
        if exits is not None:
            exits.warm_up(1 + speculation.gamma)
        model = _target_class(card)(folder, manifest.target, card.target, exits)
        model.new_session().warm_up(1 + speculation.gamma)
        return PacedTargetModel(model, card.pace, manifest.target.shape.num_layers) if card.pace else model

    def load_draft() -> DraftModel:
        model = OpenVinoDraftModel(folder, manifest.draft, card.draft)
        model.new_session().warm_up()
        return PacedDraftModel(model, card.pace) if card.pace else model

    return Engine(
        load_target,
        load_draft,
        target_cores=target_thread_cores(card.target),
        draft_cores=card.draft.cores,
        is_target_lent=card.target.is_on_cpu,
        takes_turns=layout.name == SHARED,
    )


def _wants_huge_pages(card: DeviceMap) -> bool:
    return card.target.is_on_cpu and card.target.huge_pages


def _target_class(card: DeviceMap) -> "type[OnnxTargetModel] | type[OpenVinoTargetModel]":
    if card.target.runtime == "openvino":
        from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel

        return OpenVinoTargetModel
    from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel

    return OnnxTargetModel
