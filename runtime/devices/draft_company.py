"""Drafts of several conversations at once, and turns of draft and target where both compute on the same cores.

Jobs of several conversations that wait for the draft are done side by side. Where draft and target take turns, a pass
and a window that somebody waits for are never computed at once, and a pass takes along who has drafted meanwhile.

Owns: which jobs, and for whom they wait. Does not own: how their passes become one (`backends/joint_rounds`).
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty
from time import perf_counter
from typing import Any, TypeVar

from mirrorsd.runtime.backends.joint_rounds import JointRounds
from mirrorsd.runtime.devices.company import TURN_S, WAIT_SHARE, Entry
from mirrorsd.runtime.devices.workers import WATCH_S, DeviceWorker
from mirrorsd.runtime.ledger import Ticket
from mirrorsd.runtime.turns import LOOK_S

Result = TypeVar("Result")


class DraftJob(partial[Result]):
    """A job of one conversation's draft, which may be done beside others'; never two of one `drafter` at once."""

    may_join, is_waited_for = True, False
    drafter: object = None


class AskedJob(DraftJob[Result]):
    """One without which its conversation has no next pass."""

    is_waited_for = True


class DraftCompany:
    """The conversations that draft on one worker.

    Attributes:
        rounds: makes the passes of several jobs one.
    """

    def __init__(self, worker: DeviceWorker, rounds: JointRounds, target: DeviceWorker | None) -> None:
        """`target` is the one that works on the same cores; None where each device has its own."""
        self.rounds = rounds
        # Both know it once it is open: who keeps them decides when all are freed.
        self._worker: DeviceWorker = weakref.proxy(worker)
        self._target: Callable[[], DeviceWorker | None] = (lambda: None) if target is None else weakref.ref(target)
        self._drafters: frozenset[object] = frozenset()

    def open(self) -> None:
        """Have it done so from now on."""
        self._worker.doing = self._do
        if (target := self._target()) is not None:
            target.doing = partial(self._do_of_target, weakref.proxy(target))

    @staticmethod
    def _do_of_target(target: DeviceWorker, entry: Entry) -> None:
        _do_in_turn(target, target, partial(target.with_others, entry), target.do_together)

    def _do(self, entry: Entry) -> None:
        turns = target if (target := self._target()) is not None and _is_waited_for(entry) else self._worker
        _do_in_turn(self._worker, turns, partial(self.with_others, entry), self._do_together)

    def with_others(self, entry: Entry) -> list[Entry]:
        """A job and those to do beside it: the next ones of other conversations, as far as nothing else is between.

        Who drafted together the last time is waited for, no longer than for half of a pass, nor than a moment. A text
        that was cancelled may have left a job behind: then two texts of one conversation wait, and keep their order.
        """
        if not entry.may_join:
            return [entry]
        jobs = self._worker.jobs
        entries, drafters, before, backlog = [entry], {_drafter_of(entry)}, self._drafters, jobs.backlog
        until = perf_counter() + (min(WAIT_SHARE * self.rounds.seconds, LOOK_S) if len(before) > 1 else 0.0)
        while True:
            with suppress(Empty):
                while True:
                    backlog.append(jobs.queue.get_nowait())
            while backlog and (found := backlog[0]) is not None and _drafter_of(found) not in drafters:
                if not found.may_join or _is_waited_for(found) is not _is_waited_for(entry):
                    break
                entries.append(found)
                drafters.add(_drafter_of(found))
                backlog.popleft()
            seconds = until - perf_counter()
            if backlog or drafters >= before or seconds <= 0:
                break
            with suppress(Empty):
                backlog.append(jobs.queue.get(timeout=seconds))
        self._drafters = frozenset(drafters)
        self.rounds.is_alone = len(drafters) == 1 and drafters == before
        return entries

    def _do_together(self, entries: Sequence[Entry]) -> None:
        if len(entries) == 1:
            self._worker.do(entries[0], then=partial(self._is_over, entries[0]))
            return
        started = perf_counter()
        for entry in entries:
            entry.ticket.queued_s = started - entry.queued_at if entry.queued_at is not None else 0.0
        whole = partial(self.rounds.work, [partial(self._do_beside, entry) for entry in entries])
        self._worker.do(Entry(whole, Ticket(), None, None))

    def _do_beside(self, entry: Entry) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = entry.job()
        except BaseException as error:  # handed to whoever waits, on its own thread
            failure = error
        self._is_over(entry, entry.owner, -1)
        entry.ticket.finish(result, failure)

    def _is_over(self, entry: Entry, owner: object, change: int) -> None:
        company = None if (target := self._target()) is None else target.company
        if company is not None and _is_waited_for(entry):
            company.is_coming(owner)
        self._worker.jobs.count(owner, change)


def _do_in_turn(
    worker: DeviceWorker, turns: DeviceWorker, gather: Callable[[], list[Entry]], do: Callable[[Sequence[Entry]], None]
) -> None:
    """Do a worker's jobs while nobody else has the turn: who had it until then may want to join."""
    entries = gather()
    while (own := _take_turn(turns)) is None:
        turn, late, until = turns.turn, None, perf_counter() + TURN_S
        while not (is_free := turn.acquire(timeout=min(WATCH_S, TURN_S))) and perf_counter() < until:
            late = turns.end_overdue(late)
        if not is_free:
            _pass_over(turns)
            break
        turn.release()
        worker.jobs.backlog.extendleft(reversed(entries[1:]))
        entries = gather()
    try:
        do(entries)
    finally:
        if own is not None:
            own.release()


def _pass_over(turns: DeviceWorker) -> None:
    """Who has the turn hangs: nobody waits for that again."""
    with turns.jobs.lock:
        turns.turn = threading.Lock()
        if turns.loan is not None:
            turns.loan.is_hung = True


def _take_turn(turns: DeviceWorker) -> "threading.Lock | None":
    """The turn, which is then to be released; None, at once, where another has it or the device is lent.

    Whoever it is lent to may not have the turn yet, and has no deadline while it waits for that.
    """
    with turns.jobs.lock:
        turn = turns.turn
        return turn if (turns.loan is None or turns.loan.is_hung) and turn.acquire(blocking=False) else None


def _drafter_of(entry: Entry) -> int:
    """Who must not do two jobs at once: known by its number, which keeps nothing in memory."""
    drafter = getattr(entry.job, "drafter", None)
    return id(entry.owner if drafter is None else drafter)


def _is_waited_for(entry: Entry) -> bool:
    """Else it is done beside the target, or is no draft's."""
    return bool(getattr(entry.job, "is_waited_for", False))
