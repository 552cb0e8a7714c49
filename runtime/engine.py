"""The two devices with their workers: loaded together, shared by all sessions, closed together."""

import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from mirrorsd.device_maps.pace import interpolate
from mirrorsd.devices import endings
from mirrorsd.devices.endings import Watched
from mirrorsd.devices.huge_pages import new_regions, regions_now, use_huge_pages
from mirrorsd.graphs.errors import GenerationError
from mirrorsd.runtime.backends.protocol import DraftModel, TargetModel
from mirrorsd.runtime.devices.company import Company
from mirrorsd.runtime.devices.draft_company import DraftCompany
from mirrorsd.runtime.devices.workers import DeviceWorker, pinned
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.tuned import Keeper
from mirrorsd.texts.config import GenerationConfig

_SLOTS = (2, 4, 8)
"""Conversations that share a pass at most. The more slots, the more those that are empty cost: see docs/limits.md."""


class Closable(Protocol):
    """A session, as far as the end of its devices concerns it."""

    def begin_to_close(self) -> None:
        """Stop everything, without waiting for it."""

    def finish_closing(self, timeout_s: float) -> None:
        """Release what it has on the devices."""


class DeviceThreads:
    """One worker for each device, and one that gets the draft ready for longer texts. They end together.

    Attributes:
        is_open: whether the devices may be used.
    """

    def __init__(self, target_cores: tuple[int, ...], draft_cores: tuple[int, ...], *, is_target_lent: bool) -> None:
        self.target = DeviceWorker("target", target_cores, is_lent=is_target_lent)
        self.draft = DeviceWorker("draft", draft_cores)
        self.preparing = DeviceWorker("preparing", draft_cores)
        self.is_open = True
        self._lock = threading.RLock()

    def leave_off(self) -> bool:
        """Begin nothing new; False where somebody has said so before, or they are another process's."""
        if self.target.is_forked:
            return False
        with self._lock:
            was_open, self.is_open = self.is_open, False
            return was_open

    def end(self) -> None:
        """Take no more jobs; the threads end by themselves after those they have."""
        self.is_open = False
        for worker in (self.draft, self.preparing, self.target):
            worker.end()

    def close(self) -> None:
        """End them within seconds: a device that hangs is left behind."""
        self.end()
        for worker in (self.draft, self.preparing, self.target):
            worker.close()


class SideJob:
    """A job that no token needs, on a thread of its own. It keeps no engine that is dropped."""

    def __init__(self, threads: DeviceThreads) -> None:
        self._threads = threads
        self._is_waited_for = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[Callable[[float], bool]], object]) -> None:
        """Begin it, with `rest`, which it calls after each piece."""
        self._thread = threading.Thread(target=job, args=(self.rest,), name="mirrorsd-beside", daemon=True)
        self._thread.start()

    def rest(self, seconds: float) -> bool:
        """Rest as long as a piece took where a device has worked meanwhile, unless somebody waits for the job.

        Returns:
            Whether to leave off.
        """
        if min(self._threads.target.idle_seconds(), self._threads.draft.idle_seconds()) < seconds:
            self._is_waited_for.wait(seconds)
        return not self._threads.is_open

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for its end; it makes way no more. May be called from any thread."""
        self._is_waited_for.set()
        if self._thread is not None:
            self._thread.join(timeout_s)


class SharedPasses:
    """Has conversations share the target's passes, as many as there may be at once."""

    def __init__(
        self,
        threads: DeviceThreads,
        model: TargetModel,
        seats: Collection[object],
        known: Knowledge,
        rest: Callable[[float], bool] | None,
    ) -> None:
        """`rest` lets what it needs move to huge pages, piece by piece; None where there are none."""
        self._threads, self._model, self._seats, self._known, self._rest = threads, model, seats, known, rest
        self._num_slots = 0
        self.drafts: DraftCompany | None = None
        threads.target.on_company = partial(_if_there, weakref.WeakMethod(self.open))

    def open(self, least: int = 1) -> None:
        """Open what as many need as there are, and `least`, unless there is enough for them. From any thread.

        No lock is held: the target's thread would wait for one whose holder a signal's handler has interrupted.
        """
        num_slots = next(size for size in _SLOTS if size >= min(max(len(self._seats) - 1, least), _SLOTS[-1]))
        if num_slots > self._num_slots and self._threads.is_open:
            self._num_slots = num_slots
            self._threads.preparing.leave(partial(_if_there, weakref.WeakMethod(self.join), num_slots))

    def join(self, num_slots: int) -> None:
        """Open what runs so many conversations together, and use it from then on; else they take turns."""
        worker = self._threads.target
        is_there = worker.company is not None and worker.company.batch.num_slots >= num_slots  # two have asked at once
        if is_there or not self._threads.is_open:
            return
        if self.drafts is not None:
            self.drafts.open()
        before = regions_now() if self._rest else []
        with pinned(worker.cores):
            batch = self._model.open_batch(num_slots)
        if batch is not None:
            worker.company = Company(batch, self._known.row_share)
            if self._rest is not None:
                use_huge_pages(new_regions(before), self._rest)


def _if_there(method: "weakref.WeakMethod[Callable[..., None]]", *args: int) -> None:
    """Call a method of what may have been dropped meanwhile: nothing else keeps it."""
    found = method()
    if found is not None:
        found(*args)


class Engine(Watched):
    """Target and draft models with the threads that they run on.

    The models are loaded on their own workers' threads, so that whatever threads they start stay on their cores. A
    target on a processor may be lent to the threads that wait for it; other devices keep what they need per thread.

    Attributes:
        known: about the pair on these devices, shared by all sessions.
        takes_turns: whether target and draft compute on the same cores, so that one waits rather than slow the other.
        sessions: those that use the devices, closed before them.
        seats: what has caches there.
        keeper: keeps what texts teach, if anybody does.
        beside: what is done for them while nobody waits.
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
        self._threads = threads = DeviceThreads(target_cores, draft_cores, is_target_lent=is_target_lent)
        self.target_worker, self.draft_worker = threads.target, threads.draft
        self.takes_turns, self.known = takes_turns, known or Knowledge()
        self.keeper: Keeper | None = None
        self.sessions: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.seats: weakref.WeakSet[object] = weakref.WeakSet()
        self.beside = SideJob(threads)
        # An engine that is dropped without having been closed lets its threads end.
        weakref.finalize(self, threads.end).atexit = False
        endings.watch(self)
        with ExitStack() as unless_loaded:
            unless_loaded.push(self._give_up)
            target = self.target_worker.submit(load_target)
            draft = self.draft_worker.submit(load_draft)
            self.target_model, self.draft_model = target.result(), draft.result()
            unless_loaded.pop_all()
        rest = self.beside.rest if huge_pages else None
        self._passes = SharedPasses(threads, self.target_model, self.seats, self.known, rest)
        rounds = getattr(self.draft_model, "rounds", None)  # a paced one has none
        self._passes.drafts = rounds and DraftCompany(threads.draft, rounds, threads.target if takes_turns else None)

    def _give_up(self, kind: type[BaseException] | None, *_: object) -> None:
        """End what the other device is still loading, and wait for it unless the user wants to leave."""
        if kind is not None and issubclass(kind, Exception):
            self.close()
        else:
            self._threads.end()

    @property
    def preparing_worker(self) -> DeviceWorker:
        """The thread that gets ready what a text will need."""
        return self._threads.preparing

    @property
    def is_open(self) -> bool:
        """Whether the devices may be used."""
        return self._threads.is_open

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that loaded the devices: their threads are not in it."""
        return self.target_worker.is_forked

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

    def text_ended(self, num_windows: int | None) -> None:
        """Have what it has taught kept now and then; it had so many windows, None where it wanted none."""
        if not self.is_forked:
            self.known.text_ended(num_windows)
            if self.keeper is not None:
                self.keeper.text_ended()

    def close(self) -> None:
        """Stop all sessions, then end the workers, within seconds: a device that hangs is left behind."""
        if not self._threads.leave_off():
            return
        sessions = list(self.sessions)
        for session in sessions:
            session.begin_to_close()
        if self.keeper is not None:
            self.keeper.keep()
        until = perf_counter() + endings.CLOSE_S
        for session in sessions:
            session.finish_closing(max(0.0, until - perf_counter()))
        self.beside.settle(max(0.0, until - perf_counter()))
        self._threads.close()

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
        self._passes.open(least)

    def inherited(self) -> list[Any]:
        return [self, *self.seats]
