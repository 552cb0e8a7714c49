"""Jobs of several drafts side by side, whose passes become one.

A job of a draft asks for several passes, one after another. Each of several jobs has a thread, of which one works at a
time: a pass begins once every job has asked for one or is over, and has the rows of all that were asked for.

Owns: the threads, and what is run when. Does not own: the joint pass (`draft_room`), whose jobs they are
(`devices/draft_company`).
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Protocol

from mirrorsd.devices.draft_memory import DraftPass, TipGuesses
from mirrorsd.runtime.ledger import Ticket


class JointDraft(Protocol):
    """Runs passes of a draft's sessions."""

    def run(self, passes: Sequence[DraftPass], *, is_alone: bool) -> list[TipGuesses]:
        """Run passes of different sessions, together as far as they fit; `is_alone`: nobody has shared lately."""


class JointRounds:
    """The jobs that are at work, and the passes they have asked for.

    Attributes:
        num_working: jobs that have not asked for their next pass yet; 0 where none is beside another.
        seconds: what the last pass of several took.
        is_alone: whether nobody has drafted beside who does now, nor before that.
        takes_any: whether passes may have any number of rows, so that nearly all can be one.
    """

    def __init__(self, joint: JointDraft, *, takes_any: bool) -> None:
        self.seconds, self.is_alone, self.takes_any = 0.0, True, takes_any
        self._joint, self.num_working = joint, 0
        self._asked: list[tuple[DraftPass, Ticket[TipGuesses]]] = []
        self._turn = threading.Condition()

    def work(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do jobs side by side, none of which raises; returns when all are over.

        Where the system has no more threads, those that have none are done one by one behind the others.
        """
        threads = list[threading.Thread]()
        with self._turn:  # nobody asks for a pass before it is known how many will
            with suppress(RuntimeError):
                for job in jobs[1:]:
                    thread = threading.Thread(target=self._work, args=(job,), daemon=True)
                    thread.start()
                    threads.append(thread)
            self.num_working = 1 + len(threads)
        self._work(jobs[0])
        for thread in threads:
            thread.join()
        for job in jobs[1 + len(threads) :]:
            self.num_working = 1
            self._work(job)

    def _work(self, job: Callable[[], None]) -> None:
        with self._turn:
            job()
            self.num_working -= 1
            self._run_if_all_have_asked()

    def run(self, one: DraftPass) -> TipGuesses:
        """Run a pass: alone, or, where the calling job is one of several, together with theirs.

        Raises:
            DeviceError: the device failed.
        """
        if not self.num_working:
            return self._joint.run([one], is_alone=self.is_alone)[0]
        ticket = Ticket[TipGuesses]()
        self._asked.append((one, ticket))
        self.num_working -= 1
        self._run_if_all_have_asked()
        self._turn.wait_for(ticket.done)
        return ticket.result()

    def _run_if_all_have_asked(self) -> None:
        if self.num_working or not self._asked:
            return
        asked, self._asked, started = self._asked, [], perf_counter()
        self.num_working = len(asked)
        found = self._results_of([one for one, _ in asked])
        self.seconds = perf_counter() - started
        for (_, ticket), result in zip(asked, found, strict=True):
            ticket.finish(*result)
        self._turn.notify_all()

    def _results_of(self, passes: Sequence[DraftPass]) -> list[tuple[TipGuesses | None, BaseException | None]]:
        """What each says, or how it failed: by itself, where all together did, so that only who is at fault fails."""
        try:
            return [(guesses, None) for guesses in self._joint.run(passes, is_alone=False)]
        except BaseException as error:
            return [(None, error)] if len(passes) == 1 else [self._results_of([one])[0] for one in passes]
