"""The public pipeline: load a bundle, generate, stream, cancel, open further sessions."""

from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

from mirrorsd.devices.cache_bytes import cache_bytes
from mirrorsd.devices.containers import total_memory
from mirrorsd.devices.endings import refuse_to_leave
from mirrorsd.devices.layouts import Layout
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.names import METHODS, Method
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.loading import check_runs, load_parts
from mirrorsd.runtime.seats import Seats
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.texts.config import HEAD_METHODS, Speculations
from mirrorsd.texts.request_reader import RequestReader
from mirrorsd.texts.setting_rules import checked, whole
from mirrorsd.texts.speculation import Given, resolve_speculation
from mirrorsd.texts.tokenizer import BundleTokenizer

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def _on_own_session(
    method: "Callable[Concatenate[MirrorSession, Arguments], Returned]",
) -> "Callable[Concatenate[MirrorPipeline, Arguments], Returned]":
    """The same method for a pipeline, with the same types and words: it works on the pipeline's own session."""

    @wraps(method)
    def forward(self: "MirrorPipeline", /, *args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        return method(self._own, *args, **options)

    @wraps(method)
    async def forward_awaited(self: "MirrorPipeline", /, *args: Any, **options: Any) -> Any:
        return await cast(Any, method)(self._own, *args, **options)

    # Frameworks ask what kind of function it is, to know whether to await it.
    return cast(Any, forward_awaited) if iscoroutinefunction(method) else forward


class MirrorPipeline:
    """A loaded bundle on its two devices.

    `generate`, `stream` and `cancel` work on a session of the pipeline's own, one request at a time; `session` opens
    further ones that run beside it.

    Attributes:
        manifest: what the bundle says about itself.
        device_map: the device map in use, as its layout has it.
        speculation: how it speculates in greedy texts (never changes the text).
        sampled_speculation: the same in sampled texts.
        placement: why this device map, and one line per device saying what really runs where; from soon after the first
            token on also what memory is on huge pages.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: BundleTokenizer,
        manifest: Manifest,
        layout: Layout,
        speculations: Speculations,
        placement: list[str] | None = None,
    ) -> None:
        self.manifest, self._layout, self.device_map = manifest, layout, layout.device_map
        self.speculation, self.sampled_speculation = self._ways = speculations
        self.placement = [] if placement is None else placement
        self._engine, self._reader = engine, RequestReader(tokenizer, manifest)
        self._own = self.session()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        device_map: str = "auto",
        speculation: Given | None = None,
        use_tuned: bool = True,
        layout: str | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Load a bundle.

        Args:
            bundle: the bundle's folder, or another reference to one, as `hf:OWNER/NAME` on the hub (docs/ready.md):
                what is not on this machine is fetched, once.
            device_map: name of a card, path of a card, or `auto`.
            speculation: values of `SpeculationConfig` to use instead of the card's own.
            use_tuned: start from what `mirrorsd tune` found, where it fits this machine.
            layout: one of the card's `layouts`; by default the one that was found fastest, else the card's first.
            on_progress: told where loading takes long, on the thread that does it: what is being done ("compiling the
                draft, once: 7 of 24"), and what share of it is done.

        Raises:
            BundleError: missing, damaged, of another schema, or unsafe.
            ConfigError: unknown device map or speculation setting, or a layout that the card does not permit.
            DeviceError: a device of the map is absent, or cannot run the bundle.
        """
        given = speculation or {}
        return cls(*load_parts(bundle, device_map, given, use_tuned=use_tuned, layout=layout, on_progress=on_progress))

    @property
    def layout(self) -> str:
        """How target and draft share the processor's cores (see `layouts`)."""
        return self._layout.name

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that run here: those of heads need one in the bundle, and a target on ONNX Runtime."""
        return tuple(method for method in METHODS if method not in HEAD_METHODS or method in self._own.heads)

    @property
    def advice(self) -> str:
        """What would probably make texts faster, in a sentence: `mirrorsd tune` where drafting pays; else empty."""
        known = self._engine.known
        if known.is_tuned or not known.does_drafting_pay:
            return ""
        return "Drafting pays here: `mirrorsd tune BUNDLE` looks for settings that pay more, in 90 s."

    @property
    def tokenizer(self) -> BundleTokenizer:
        """The bundle's tokenizer and chat template."""
        return self._reader.tokenizer

    @property
    def engine(self) -> Engine:
        """The devices and their workers, for measuring them: what goes on beside texts after loading is done."""
        self._engine.beside.settle()
        return self._engine

    def session(self, speculation: Given | None = None) -> MirrorSession:
        """Open a session with caches of its own; it shares the devices fairly with the others.

        Use it as a context manager, or close it, where many are opened. It keeps the pipeline's devices alive.

        Args:
            speculation: how this session speculates, whole or what differs from the pipeline's own ways.

        Raises:
            GenerationError: the pipeline is closed.
            ConfigError: it cannot be: see `load`.
        """
        ways = Speculations(*(resolve_speculation(one, speculation or {}) for one in self._ways))
        check_runs(ways, self.device_map, self.manifest)
        self._engine.check_usable()
        return MirrorSession(self._engine, self._reader, self.manifest, ways, self._layout)

    def prepare_constraints(self) -> None:
        """Read the vocabulary for constrained texts, which the first of them would do: it stops every thread a second.

        Does nothing without llguidance, or for a model whose texts have no end.

        Raises:
            ConfigError: llguidance cannot read the tokenizer.
        """
        self._reader.constraints.prepare()

    def seats(self, count: int) -> Seats:
        """Several sessions, handed out by what they have cached: see `Seats`. Close them, or the pipeline.

        Raises:
            ConfigError: `count` is not a whole number of 1 or more.
            DeviceError: there is no room for so many caches (`Seats.bytes_per_seat`).
            GenerationError: the pipeline is closed.
        """
        count = checked(whole(1), "seats", "count", count)
        needed, there = count * cache_bytes(self.manifest), total_memory()
        if needed > there:
            raise DeviceError(f"{count} seats may take {needed / 1e9:.1f} GB; this machine has {there / 1e9:.1f} GB.")
        return Seats(self.session, count, cache_bytes(self.manifest))

    generate = _on_own_session(MirrorSession.generate)
    stream = _on_own_session(MirrorSession.stream)
    generate_several = _on_own_session(MirrorSession.generate_several)
    astream = _on_own_session(MirrorSession.astream)
    agenerate = _on_own_session(MirrorSession.agenerate)
    encode = _on_own_session(MirrorSession.encode)

    def __repr__(self) -> str:
        sources = " and ".join(entry.source.name for entry in (self.manifest.target, self.manifest.draft))
        state = "" if self._engine.is_open else ", closed"
        return f"<{type(self).__name__}: {sources} on {self.device_map.name}, {self.layout}{state}>"

    def cancel(self) -> None:
        """Stop the pipeline's own session from any thread: it raises `Cancelled` within one step."""
        self._own.cancel()

    def close(self) -> None:
        """Stop all sessions and release both devices. The pipeline cannot be used afterwards.

        Returns within seconds whatever they are at: a device that hangs is left behind.
        """
        self._engine.close()

    def __reduce__(self) -> NoReturn:
        refuse_to_leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
