"""The two devices with their workers: loaded together, shared by all sessions, closed together."""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from mirrorsd.device_maps.pace import interpolate
from mirrorsd.devices.huge_pages import new_regions, regions_now, use_huge_pages
from mirrorsd.graphs.errors import ConfigError, GenerationError
from mirrorsd.graphs.manifest import Manifest, TargetEntry
from mirrorsd.graphs.names import OWN_HEAD
from mirrorsd.runtime.backends.protocol import DraftModel, TargetModel
from mirrorsd.runtime.devices import endings
from mirrorsd.runtime.devices.company import Company
from mirrorsd.runtime.devices.endings import Watched
from mirrorsd.runtime.devices.workers import DeviceWorker, pinned
from mirrorsd.runtime.policy.account import Knowledge
from mirrorsd.texts.config import HEAD_METHODS, GenerationConfig, SpeculationConfig

_BESIDE_S = 1.0
_SLOTS = (2, 4, 8)
"""Conversations that share a pass at most. The more slots, the more those that are empty cost: see docs/limits.md."""


class Closable(Protocol):
    """A session, as far as the end of its devices concerns it."""

    def begin_to_close(self) -> None:
        """Stop everything, without waiting for it."""

    def finish_closing(self, timeout_s: float) -> None:
        """Release what it has on the devices."""


class Keeps(Protocol):
    """Who keeps what texts teach for later loads."""

    def text_ended(self) -> None:
        """Keep it now and then."""

    def keep(self) -> None:
        """Keep it now."""


class Engine(Watched):
    """Target and draft models, one worker each, and one that gets the draft ready for longer texts.

    The models are loaded on their own workers' threads, so that whatever threads they start stay on their cores. A
    target on a processor may be lent to the threads that wait for it; other devices keep what they need per thread.

    Attributes:
        known: about the pair on these devices, shared by all sessions.
        takes_turns: whether target and draft compute on the same cores, so that one waits rather than slow the other.
        sessions: those that use the devices, closed before them.
        seats: what has caches there.
        keeper: keeps what texts teach, if anybody does.
        is_open: whether the devices may be used.
    """

    def __init__(
        self,
        load_target: Callable[[], TargetModel],
        load_draft: Callable[[], DraftModel],
        *,
        known: Knowledge | None = None,
        target_cores: tuple[int, ...] = (),
        draft_cores: tuple[int, ...] = (),
        is_target_lent: bool = False,
        takes_turns: bool = False,
        huge_pages: bool = False,
    ) -> None:
        self.target_worker = DeviceWorker("target", target_cores, is_lent=is_target_lent)
        self.draft_worker = DeviceWorker("draft", draft_cores)
        self.preparing_worker = DeviceWorker("preparing", draft_cores)
        self.takes_turns, self._target_cores, self._huge_pages = takes_turns, target_cores, huge_pages
        self.known = known or Knowledge()
        self.keeper: Keeps | None = None
        self.sessions: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.seats: weakref.WeakSet[object] = weakref.WeakSet()
        self.is_open = True
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._beside: threading.Thread | None = None
        self._is_waited_for = threading.Event()
        # An engine that is dropped without having been closed lets its threads end.
        self._end_workers = weakref.finalize(self, _end, self.draft_worker, self.preparing_worker, self.target_worker)
        self._end_workers.atexit = False
        endings.watch(self)
        with ExitStack() as unless_loaded:
            unless_loaded.push(self._give_up)
            target = self.target_worker.submit(load_target)
            draft = self.draft_worker.submit(load_draft)
            self.target_model, self.draft_model = target.result(), draft.result()
            unless_loaded.pop_all()
        self._num_slots = 0
        self.target_worker.on_company = partial(_open_company, weakref.ref(self))

    def _give_up(self, kind: type[BaseException] | None, *_: object) -> None:
        """End what the other device is still loading, and wait for it unless the user wants to leave."""
        if kind is not None and issubclass(kind, Exception):
            self.close()
        else:
            self._end_workers()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that loaded the devices: their threads are not in it."""
        return os.getpid() != self._process

    def check_usable(self) -> None:
        """Refuse to go on without devices.

        Raises:
            GenerationError: they are closed, or belong to the parent of this forked process.
        """
        if self.is_forked:
            raise GenerationError(
                "This process was forked after the bundle was loaded, and the threads of its devices stayed behind. "
                "Load the bundle in the process that uses it, or start that process with the method 'spawn'."
            )
        if not self.is_open:
            endings.wait_for_end()
            raise GenerationError("This pipeline is closed: load the bundle again.")

    def plain_tokens_per_second(self, config: GenerationConfig) -> float | None:
        """How fast plain decoding of such a text is, as far as anything was measured.

        That is what `auto` or `tune` has seen, else passes of one row by the target's own times; None without either.
        """
        speed = self.known.pairs[config.is_sampling].plain_speed
        if not speed and self.known.target_ms:
            speed = 1e3 / interpolate(self.known.target_ms, 1)
        return speed or None

    def describe(self) -> list[str]:
        """One line per device."""
        return [self.target_model.describe(), self.draft_model.describe()]

    def do_beside(self, job: Callable[[Callable[[float], bool]], object]) -> None:
        """Begin a job that no token needs, on a thread of its own.

        After each piece, it calls a function with the seconds that the piece took. Where a device has worked meanwhile,
        that rests as long, unless somebody waits for the job (`settle`). It says whether to leave off.
        """
        rest = partial(_rest, weakref.ref(self), self._is_waited_for)
        self._beside = threading.Thread(target=job, args=(rest,), name="mirrorsd-beside", daemon=True)
        self._beside.start()

    def settle(self) -> None:
        """Wait for what `do_beside` has begun, which makes way no more. May be called from any thread."""
        if self._beside is not None:
            self._is_waited_for.set()
            self._beside.join()

    def text_ended(self) -> None:
        """Have what it has taught kept now and then."""
        if self.keeper is not None and not self.is_forked:
            self.keeper.text_ended()

    def close(self) -> None:
        """Stop all sessions, then end the workers, within seconds: a device that hangs is left behind."""
        with self._lock:
            if not self.is_open or self.is_forked:
                return
            self.is_open = False
        sessions = list(self.sessions)
        for session in sessions:
            session.begin_to_close()
        if self.keeper is not None:
            self.keeper.keep()
        until = perf_counter() + endings.CLOSE_S
        for session in sessions:
            session.finish_closing(max(0.0, until - perf_counter()))
        self._is_waited_for.set()
        if self._beside is not None:
            self._beside.join(_BESIDE_S)
        self._end_workers()
        self.draft_worker.close()
        self.preparing_worker.close()
        self.target_worker.close()

    def num_sharing(self, wanted: int) -> int:
        """How many of so many conversations can share passes now; what they all need is opened. From any thread."""
        self.open_company(wanted)
        company = self.target_worker.company
        return 1 if company is None else min(wanted, company.batch.num_slots)

    def open_company(self, least: int = 1) -> None:
        """Have several conversations share passes from soon on: some of them are decoding at once. From any thread.

        What that needs is opened beside the texts that run, for as many as there may be and for `least`; see
        `TargetModel.open_batch`.
        """
        num_slots = next(size for size in _SLOTS if size >= min(max(len(self.seats) - 1, least), _SLOTS[-1]))
        with self._lock:
            if num_slots <= self._num_slots or not self.is_open:
                return
            self._num_slots = num_slots
        self.preparing_worker.leave(partial(_open_batch, weakref.ref(self), num_slots))

    def join_passes(self, num_slots: int) -> None:
        """Open what runs so many conversations together, and use it from then on; else they take turns."""
        before = regions_now() if self._huge_pages else []
        with pinned(self._target_cores):
            batch = self.target_model.open_batch(num_slots)
        if batch is not None:
            self.target_worker.company = Company(batch)
            if self._huge_pages:
                use_huge_pages(new_regions(before), partial(_rest, weakref.ref(self), self._is_waited_for))

    def inherited(self) -> list[Any]:
        return [self, *self.seats]


def _open_company(engine: "weakref.ref[Engine]") -> None:
    found = engine()
    if found is not None:
        found.open_company()


def _open_batch(engine: "weakref.ref[Engine]", num_slots: int) -> None:
    found = engine()
    if found is not None and found.is_open:
        found.join_passes(num_slots)


def _rest(engine: "weakref.ref[Engine]", is_waited_for: threading.Event, seconds: float) -> bool:
    found = engine()
    if found is not None and min(found.target_worker.idle_seconds(), found.draft_worker.idle_seconds()) < seconds:
        del found  # nothing keeps a dropped engine
        is_waited_for.wait(seconds)
        found = engine()
    return found is None or not found.is_open


def _end(*workers: DeviceWorker) -> None:
    for worker in workers:
        worker.end()


def resolve_speculation(defaults: SpeculationConfig, overrides: Mapping[str, object]) -> SpeculationConfig:
    """The device map's defaults with the caller's values on top.

    Raises:
        ConfigError: unknown name, or a value out of its range.
    """
    unknown = sorted(set(overrides) - set(SpeculationConfig.__dataclass_fields__))
    if unknown:
        allowed = ", ".join(SpeculationConfig.__dataclass_fields__)
        raise ConfigError(f"There is no speculation setting {unknown[0]!r}; there are {allowed}.")
    exits = overrides.get("exits")  # JSON knows no tuples
    given = {**overrides, "exits": tuple(exits)} if isinstance(exits, list) else overrides
    return replace(defaults, **given)  # type: ignore[arg-type]


def check_exits(speculation: SpeculationConfig, target: TargetEntry) -> None:
    """Refuse exits that a bundle does not have.

    Raises:
        ConfigError: there is no exit after one of the layers.
    """
    present = [point.layer for point in target.exits]
    absent = [layer for layer in speculation.exits if layer not in present] if speculation.exits != "all" else []
    if absent:
        raise ConfigError(f"exits names layer {absent[0]}; this bundle has exits after layers {present}")


def check_head(method: str, manifest: Manifest, heads: Collection[str]) -> None:
    """Refuse a method whose head is not here; `heads` are the kinds that can run.

    Raises:
        ConfigError: the bundle has no such head, or the target's runtime runs none.
    """
    if method not in HEAD_METHODS or method in heads:
        return
    if any(head.kind == method for head in manifest.heads):
        raise ConfigError(
            f"method is {method!r}: its head runs on ONNX Runtime, beside a target that does. This device map's target "
            "runs on OpenVINO; choose another device map (`mirrorsd devices`) or method."
        )
    present = ", ".join(head.kind for head in manifest.heads) or "none"
    if method == OWN_HEAD:
        raise ConfigError(
            f"method is {method!r}; this bundle has no such head (it has: {present}). It comes with some checkpoints "
            "(`mtp.*` in their weights, as Qwen3.5's); this one's had none when it was exported."
        )
    raise ConfigError(
        f"method is {method!r}; this bundle has no such head (it has: {present}). Train one with `mirrorsd train head "
        f"--kind {method}`, and export the target again with `--head FOLDER`."
    )
