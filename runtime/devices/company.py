"""What is asked of a device and queued for it, who decodes beside whom, and for whom a joint pass waits.

Owns: when each conversation's last pass ended, and whether it comes back at once. Does not own: the passes
(`workers`), how rows are put together (`backends/protocol.TargetBatch`).

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

from mirrorsd.runtime.backends.protocol import TargetBatch
from mirrorsd.runtime.ledger import TIME_MEMORY, Joint, Overdue, Result, TargetOutput, TargetPass, Ticket
from mirrorsd.texts.config import SpeculationConfig

_WAIT_SHARE = 0.5
"""Of a pass's time that the others wait for who is late."""
_MOST_CHUNK = SpeculationConfig().prefill_rows
RUN_S = SpeculationConfig().target_deadline_s
_FIRST_CHUNK, _CHUNK_SHARE = 8, 0.75
"""Rows of a prompt. The first counts for a few passes only, and there are no fewer: they cost less than any pass. And
what all may take, of a pass: with 1, one pass in a hundred held texts up for three steps, since times vary
(`bench/claims/serving/company.py BUNDLE --rounds 0 --arriving 1500 --with _CHUNK_SHARE=1`; so others here, too)."""
_FIRST_GUESSES, _FORGOTTEN = 16, 0.005
"""Guesses that take a pass's time, before any was seen. And what every pass without a guess makes of that again."""


class Entry(NamedTuple):
    """A job in the queue; `queued_at` (seconds of `perf_counter`) if another owner's job is before it."""

    job: Any
    ticket: Ticket[Any]
    owner: object
    queued_at: float | None

    @property
    def may_join(self) -> bool:
        """Whether it is a pass that can be run with others'."""
        return isinstance(self.job, TargetPass) and self.job.may_join


class _RowTimes:
    """What rows beside one of each text take; until then as if so many, `first`, took as long as these."""

    def __init__(self, first: int) -> None:
        self._first, self._rows, self._seconds = float(first), float(first), 0.0

    def observe(self, num_rows: int, seconds: float, step: float) -> None:
        """So many took so long, beside what a `step` takes. A single measurement is not yet believed."""
        most = 2 * num_rows * self.of_one(step)
        self._seconds = TIME_MEMORY * (self._seconds or step) + min(max(seconds, 0.0), most)
        self._rows = TIME_MEMORY * self._rows + num_rows

    def forget(self, step: float) -> None:
        """A pass without them: what seems too dear is tried again some time."""
        if self._seconds:
            self._seconds += _FORGOTTEN * (step - self._seconds)
            self._rows += _FORGOTTEN * (self._first - self._rows)

    def of_one(self, step: float) -> float:
        """What one of them takes."""
        return (self._seconds or step) / self._rows


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

    def __init__(self, batch: TargetBatch) -> None:
        self.batch = batch
        self._members: dict[object, _Member] = {}
        self._steps: dict[int, float] = {}
        self._seconds, self._num_readers = 0.0, 1
        self._prompts, self._guesses = _RowTimes(_FIRST_CHUNK), _RowTimes(_FIRST_GUESSES)

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
        prompts, num_written, step = [len(entry.job.tokens) for entry in readers], len(entries) - len(readers), 0.0
        if num_written:
            num_guesses = sum(len(entry.job.tokens) for entry in entries) - sum(prompts) - num_written
            step = self._learn(seconds, num_written, num_guesses, prompts)
        guess_s = self._guesses.of_one(step)
        joint = Joint(len(entries) - 1, guess_s, max(1, int(step / (guess_s or 1.0) / len(entries))))
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
        """A pass of one conversation alone is over."""
        readers = [entry.owner] if entry.job.with_logits is None else []
        self.ends([entry.owner], 0.0 if readers else self._learn(seconds, 1, len(entry.job.tokens) - 1, []), readers)

    def rows_of_prompt(self, owner: object, others: Iterable[object], most: int) -> int:
        """How many rows of a prompt, at most `most`, shall pass at once: few where one of the `others` is written."""
        now = perf_counter()
        waiting = [self._members.get(other) for other in others if other is not owner]
        known = [(other, one) for other, one in list(self._members.items()) if other is not owner and one.is_prompt]
        about_to_come = [one for _, one in known if one.ended + _WAIT_SHARE * self._seconds > now]
        is_one_written = any(member is None or not member.is_reading for member in (*waiting, *about_to_come))
        return min(most, self.chunk_rows) if is_one_written else most

    def _learn(self, seconds: float, num_written: int, num_guesses: int, prompts: Sequence[int]) -> float:
        """A pass of so many texts, with so many guesses and rows of each prompt beside them, took so long.

        Returns:
            What it takes without those; at the most, where no such pass was seen.
        """
        nearest = min(self._steps, key=lambda number: abs(number - num_written), default=num_written)
        step = min(self._steps.get(nearest, seconds), seconds)
        if prompts:
            self._num_readers = len(prompts)
            self._prompts.observe(sum(prompts), seconds - step - num_guesses * self._guesses.of_one(step), step)
        elif num_guesses:
            self._guesses.observe(num_guesses, seconds - step, step)
        else:
            known = self._steps.get(num_written, seconds)
            step = TIME_MEMORY * known + (1 - TIME_MEMORY) * min(seconds, 2 * known)
            self._guesses.forget(step)
        self._steps[num_written] = step
        return step

    @property
    def chunk_rows(self) -> int:
        """Rows of a prompt that ride along in a pass, so many that it takes longer by a share of its time at the most.

        What they cost depends on how long their text is already, so it is learned from every such pass, over what one
        of as many texts takes without them.
        """
        found = _CHUNK_SHARE * self._seconds / (self._prompts.of_one(self._seconds) or 1.0) / self._num_readers
        return int(min(max(found, _FIRST_CHUNK), _MOST_CHUNK))

    def arrives(self, owner: object) -> None:
        """A conversation wants a pass. From any thread."""
        member = self._members.get(owner)
        if member is not None:
            member.is_prompt = perf_counter() - member.ended <= _WAIT_SHARE * self._seconds

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
        now, most = perf_counter(), _WAIT_SHARE * self._seconds
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

    def chunk_rows(self, owner: object, most: int) -> int:
        """How many rows of a prompt, at most `most`, shall pass at once."""

    def running_seconds(self) -> float:
        """For how long the job that the device is at has been running."""

    def has_waiting(self) -> bool:
        """Whether another job waits behind the running one."""

    def serves(self, owner: object) -> bool:
        """Whether a job of this owner is waiting or running."""

    def serves_others(self, owner: object) -> bool:
        """Whether a job of another owner is waiting or running."""
