"""The thread of a draft's device: jobs of several conversations that wait are done side by side.

Owns: which jobs, and for whom they wait. Does not own: how their passes become one (`backends/joint_rounds`).
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty
from time import perf_counter
from typing import Any, Generic, TypeVar

from mirrorsd.runtime.backends.joint_rounds import JointRounds
from mirrorsd.runtime.devices.company import WAIT_SHARE, Entry
from mirrorsd.runtime.devices.workers import DeviceWorker

Result = TypeVar("Result")


class DraftJob(Generic[Result]):
    """A job of one conversation's draft, which may be done beside others'."""

    may_join = True

    def __init__(self, work: Callable[[], Result], *, is_waited_for: bool) -> None:
        """`is_waited_for`: its conversation asks the target for nothing before it is over."""
        self._work, self.is_waited_for = work, is_waited_for

    def __call__(self) -> Result:
        """Do it."""
        return self._work()


class DraftWorker(DeviceWorker):
    """As `DeviceWorker`, where each draft's job may be several passes.

    Attributes:
        rounds: makes the passes of several jobs one; None where each is done by itself.
        target: works on the same cores, where one of both waits for the other; None where each has its own.
    """

    rounds: JointRounds | None = None
    target: DeviceWorker | None = None
    _owners: frozenset[object] = frozenset()

    def _with_others(self, entry: Entry) -> list[Entry]:
        """A job and those to do beside it: the next ones of other conversations, as far as nothing else is between.

        Who drafted together the last time is waited for, no longer than for half of a pass.
        """
        if self.rounds is None or not entry.may_join:
            return [entry]
        entries, owners, before, backlog = [entry], {entry.owner}, self._owners, self._jobs.backlog
        until = perf_counter() + (WAIT_SHARE * self.rounds.seconds if len(before) > 1 else 0.0)
        while True:
            with suppress(Empty):
                while True:
                    backlog.append(self._jobs.queue.get_nowait())
            while backlog and (found := backlog[0]) is not None and found.owner not in owners:
                if not found.may_join or _is_waited_for(found) is not _is_waited_for(entry):
                    break
                entries.append(found)
                owners.add(found.owner)
                backlog.popleft()
            seconds = until - perf_counter()
            if backlog or owners >= before or seconds <= 0:
                break
            with suppress(Empty):
                backlog.append(self._jobs.queue.get(timeout=seconds))
        self._owners = frozenset(owners)
        self.rounds.is_alone = len(owners) == 1 and owners == before
        return entries

    def _turn_of(self, entry: Entry) -> threading.Lock:
        return self.target.turn if self.target is not None and _is_waited_for(entry) else self.turn

    def _do_together(self, entries: Sequence[Entry]) -> None:
        if self.rounds is None or len(entries) == 1:
            super()._do_together(entries)
            return
        self._job_started = started = perf_counter()
        for entry in entries:
            entry.ticket.queued_s = started - entry.queued_at if entry.queued_at is not None else 0.0
        self.rounds.work([partial(self._do_beside, entry) for entry in entries])
        self._job_started, self._last_ended = None, perf_counter()

    def _do_beside(self, entry: Entry) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = entry.job()
        except BaseException as error:  # handed to whoever waits, on its own thread
            failure = error
        self._is_over(entry)
        entry.ticket.finish(result, failure)

    def _is_over(self, entry: Entry) -> None:
        if self.target is not None and self.target.company is not None and _is_waited_for(entry):
            self.target.company.is_coming(entry.owner)
        super()._is_over(entry)


def _is_waited_for(entry: Entry) -> bool:
    """Else it is done beside the target, or is no draft's."""
    return bool(getattr(entry.job, "is_waited_for", False))
