"""What is asked of a device and queued for it, who decodes beside whom, and for whom a joint pass waits.

Owns: when each conversation's last pass ended, whether it comes back at once, and how much of a prompt is read beside
others. Does not own: the passes (`workers`), what they take (`pass_times`), how rows are put together
(`backends/protocol.TargetBatch`).

A conversation that joins a pass late needs another one, so the others wait for it, but no longer than half a pass: that
is what they would lose if it came while their own pass runs. Nobody waits for one that did not come back in that time
the last time, as one whose client is slow or whose draft is at work, nor twice for one that has gone.
"""

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from mirrorsd.runtime.backends.protocol import MOST_SEATED, TargetBatch
from mirrorsd.runtime.devices.pass_times import PassTimes
from mirrorsd.runtime.ledger import Joint, Overdue, Result, TargetOutput, TargetPass, Ticket
from mirrorsd.texts.config import SpeculationConfig

WAIT_SHARE = 0.5
"""Of a pass's time that the others wait for who is late."""
_MOST_CHUNK = SpeculationConfig().prefill_rows
RUN_S, TURN_S = SpeculationConfig().target_deadline_s, SpeculationConfig().draft_deadline_s
_READ_SHARE, _MOST_READ_SHARE = 1.0, 2.0
"""Of a pass's time, that a part of a prompt may take beside texts
(`bench/claims/serving/company.py BUNDLE --rounds 0 --arriving 1500 --with _READ_SHARE=0.75`); and where prompts take
turns, however many they are: texts never stand still for longer than two of their steps
(there with `BUNDLE --users 8 --prompts spec_bench_240.jsonl --count 30 --with _MOST_READ_SHARE=1`)."""


class Entry(NamedTuple):
    """A job in the queue; `queued_at` (seconds of `perf_counter`) if another owner's job is before it."""

    job: Any
    ticket: Ticket[Any]
    owner: object
    queued_at: float | None

    @property
    def may_join(self) -> bool:
        """Whether it can be run with others'."""
        return bool(getattr(self.job, "may_join", False))


@dataclass(slots=True)
class _Member:
    ended: float
    is_prompt: bool
    is_reading: bool = False


class Company:
    """The conversations that share a device's passes.

    Attributes:
        batch: runs their rows together.
    """

    def __init__(self, batch: TargetBatch, row_share: float = 0.0) -> None:
        """Of a pass of one row alone, `row_share` is what another one was measured to take; 0 where nobody knows."""
        self.batch = batch
        self._members: dict[object, _Member] = {}
        self._seconds, self._times = 0.0, PassTimes(row_share)

    def gather(self, first: Entry, backlog: "deque[Entry | None]", jobs: "SimpleQueue[Entry | None]") -> list[Entry]:
        """A job and the passes to run with it: of those that wait, and of those that are about to come.

        What else is in the queue moves to the backlog, in its order. It waits for those who are about to come, too: a
        pass without them would take almost as long, and they would need another one.
        """
        entries, most = [first], self.batch.num_slots
        if not self.batch.takes(first.job, []):
            return entries
        while True:
            with suppress(Empty):
                while True:
                    backlog.append(jobs.get_nowait())
            self._join(entries, backlog)
            if len(entries) == most or None in backlog:  # that is the end
                return entries
            present = {entry.owner for entry in (*entries, *backlog) if entry is not None}
            seconds = self.seconds_to_wait(present)
            if not seconds:
                return entries
            try:
                backlog.append(jobs.get(timeout=seconds))
            except Empty:
                return entries

    def _join(self, entries: list[Entry], backlog: "deque[Entry | None]") -> None:
        """Move passes of sessions that are not among the entries yet: of one session's jobs, the first that waits."""
        sessions = {entry.job.session for entry in entries}
        for entry in list(backlog):
            if entry is None:  # the end: what comes behind it never does
                return
            is_new = isinstance(entry.job, TargetPass) and entry.job.session not in sessions
            if is_new and entry.may_join and self.batch.takes(entry.job, [found.job for found in entries]):
                backlog.remove(entry)
                entries.append(entry)
            if isinstance(entry.job, TargetPass):
                sessions.add(entry.job.session)

    def run(self, entries: Sequence[Entry]) -> list[TargetOutput]:
        """Run passes together, and say in their tickets how long they stood in the queue and in what company.

        Raises:
            DeviceError: the device failed.
        """
        started = perf_counter()
        for entry in entries:
            entry.ticket.queued_s = started - entry.queued_at if entry.queued_at is not None else 0.0
        outputs = self.batch.run([entry.job for entry in entries])
        seconds = perf_counter() - started
        readers = [entry for entry in entries if entry.job.with_logits is None]
        self._times.observe(seconds, [entry.job for entry in entries])
        num_written = len(entries) - len(readers)
        step = self._times.of_texts(num_written) if num_written else 0.0
        joint = Joint(len(entries) - 1, self._times.of_guess, texts_s=step)
        if joint.guess_s and step:  # else nobody knows, or they are free, and nothing bounds them
            joint = joint._replace(most_guesses=max(1, int(step / joint.guess_s / len(entries))))
        for entry in entries:
            entry.ticket.joint = joint
        self.ends([entry.owner for entry in entries], step, [entry.owner for entry in readers])
        return outputs

    def attempt(self, entries: Sequence[Entry]) -> tuple[list[TargetOutput | None] | None, BaseException | None]:
        """As `run`, where the device may fail: nothing of each if all were given up, None if each is to be run alone.

        Then no more passes should be run together.
        """
        try:
            return [*self.run(entries)], None
        except BaseException as error:  # whose rows it was cannot be told: each is asked alone
            if self.batch.is_given_up:
                return [None] * len(entries), error
            words = f"Conversations take turns from here on, as a pass of {len(entries)} of them failed: {error}"
            with suppress(RuntimeWarning):  # a filter may make it an error, of which the device's thread must not end
                warnings.warn(words, RuntimeWarning, stacklevel=1)
            return None, error

    def ended_alone(self, entry: Entry, seconds: float) -> None:
        """A pass of one conversation alone is over.

        A prompt's rows take there what they take in company. A text's pass does not, as its graph is another one, and
        says only how long others wait: without its guesses, as far as that is known.
        """
        if entry.job.with_logits is None:
            self._times.observe(seconds, [entry.job])
            self.ends([entry.owner], 0.0, [entry.owner])
        else:
            self.ends([entry.owner], min(seconds, self._times.of_texts(1) or seconds))

    def rows_of_prompt(self, owner: object, others: Iterable[object], start: int, most: int) -> int:
        """How many rows of a prompt, behind `start` and at most `most`, shall pass at once.

        Few where one of the `others` is written.
        """
        now = perf_counter()
        waiting = [self._members.get(other) for other in others if other is not owner]
        known = [(other, one) for other, one in list(self._members.items()) if other is not owner and one.is_prompt]
        about_to_come = [one for _, one in known if one.ended + WAIT_SHARE * self._seconds > now]
        if all(member is not None and member.is_reading for member in (*waiting, *about_to_come)):
            return most
        num_reading = sum(member is not None and member.is_reading for member in waiting)
        return min(most, self.chunk_rows(start, 1 + num_reading))

    def chunk_rows(self, start: int, num_reading: int = 1) -> int:
        """Rows of a prompt, behind `start`, that ride along in a pass, so many that it takes longer by a share of it.

        Where more are read, which take turns, the share is larger. They are no fewer than a text may bring.
        """
        seconds = min(_READ_SHARE * num_reading, _MOST_READ_SHARE) * self._seconds
        return int(min(max(seconds / (self._times.of_prompt_row(start) or 1.0), MOST_SEATED), _MOST_CHUNK))

    def is_coming(self, owner: object) -> None:
        """A conversation has what it needs for its next pass. From any thread."""
        self._members.setdefault(owner, _Member(0.0, is_prompt=True)).ended = perf_counter()

    def arrives(self, owner: object) -> None:
        """A conversation wants a pass. From any thread."""
        member = self._members.get(owner)
        if member is not None:
            member.is_prompt = perf_counter() - member.ended <= WAIT_SHARE * self._seconds

    def ends(self, owners: Collection[object], seconds: float, readers: Collection[object] = ()) -> None:
        """A pass of these conversations is over; such take so long, 0 where that says nothing of others.

        `readers` are those of them whose prompts were read.
        """
        now = perf_counter()
        if seconds:
            self._seconds = seconds
        for owner in owners:
            member = self._members.setdefault(owner, _Member(now, is_prompt=False))
            member.ended, member.is_reading = now, owner in readers

    def seconds_to_wait(self, present: Collection[object]) -> float:
        """For how long the `present` wait for somebody who is about to come; 0 where there is nobody."""
        now, most = perf_counter(), min(WAIT_SHARE * self._seconds, TURN_S)  # a process may have been stopped in a pass
        left = 0.0
        for owner, member in list(self._members.items()):
            if owner in present:
                continue
            seconds = member.ended + most - now
            if seconds <= 0:
                self._members.pop(owner, None)
            elif member.is_prompt:
                left = max(left, seconds)
        return left


class Worker(Protocol):
    """What decoding asks of a device: of `DeviceWorker`, or of one in simulated time."""

    company: Company | None

    def submit(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = RUN_S) -> Ticket[Result]:
        """Queue a job."""

    def perform(
        self, job: Callable[[], Result], owner: object = None, overdue: Overdue | None = None
    ) -> Ticket[Result]:
        """As `submit`, for a caller that would only wait."""

    def run(self, job: Callable[[], Result], owner: object = None, *, deadline_s: float = RUN_S) -> Result:
        """Submit a job and wait for it."""

    def wait(self, ticket: Ticket[Any], deadline_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a job; whether it is done."""

    def chunk_rows(self, owner: object, start: int, most: int) -> int:
        """How many rows of a prompt, behind `start` and at most `most`, shall pass at once."""

    def running_seconds(self) -> float:
        """For how long the job that the device is at has been running."""

    def has_waiting(self) -> bool:
        """Whether another job waits behind the running one."""

    def serves(self, owner: object) -> bool:
        """Whether a job of this owner is waiting or running."""

    def serves_others(self, owner: object) -> bool:
        """Whether a job of another owner is waiting or running."""
