"""Mirror decoding: while the target verifies one window, the draft prepares the next for each likely outcome."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import ExitGuesses, TargetOutput
from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.draft_link import DraftLink
from mirrorsd.runtime.decoding.expansion import Expansion, Occasion
from mirrorsd.runtime.decoding.plain import InFlight
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.serial import SerialDecoder
from mirrorsd.runtime.decoding.target_link import TargetLink
from mirrorsd.runtime.devices.workers import Ticket
from mirrorsd.runtime.draft.branches import BranchTable
from mirrorsd.runtime.draft.drafter import cut_window
from mirrorsd.runtime.policy.roots import RootPlanner
from mirrorsd.runtime.policy.times import PassClock


class MirrorDecoder(SerialDecoder):
    """Mirror speculative decoding: while the target's suffix runs, the draft prepares for each likely correction.

    The two devices meet once per step, at verification (Mirror-SD, arXiv 2510.13161, section 3).
    """

    name = "mirror"

    def __init__(
        self, request: Request, target: TargetLink, draft: DraftLink, passes: int, planner: RootPlanner
    ) -> None:
        super().__init__(request, target, draft, passes)
        self.planner = planner
        self._new_table: Callable[[], BranchTable] = BranchTable
        self._table = BranchTable()
        self._pass_time = PassClock()
        self._expansion: Expansion | None = None
        self._pass_started = 0.0

    def _run_target(self, inflight: InFlight) -> Ticket[TargetOutput]:
        self._table = self._new_table()
        is_useful = self.request.window_limit() > 0 and not self._is_crowded(1 + len(inflight.window))
        is_preparing = is_useful and self.draft.has_text and self.draft.is_working()
        return self.target.submit(
            self.request,
            inflight.head,
            inflight.window,
            on_start=partial(self._begin, inflight if is_preparing else None),
            on_exit=self._pass_on if is_preparing and self.planner.is_listening else None,
        )

    def _begin(self, inflight: InFlight | None) -> None:
        """Runs on the target's thread as its device starts: let the draft prepare for what comes after `inflight`.

        What can be worked out on the draft's thread is: here, the target's device waits.
        """
        self._pass_started = self.request.ledger.now()
        if inflight is not None:
            self.draft.release(partial(self._prepare, inflight, self._table, self._pass_started))

    def _prepare(self, inflight: InFlight, table: BranchTable, started: float) -> None:
        """Runs on the draft's thread."""
        self._expansion = Expansion(self.draft, self.planner, self._occasion(inflight, started), table)
        self._expansion.begin()

    def _is_crowded(self, num_rows: int) -> bool:
        """Whether another conversation keeps the target so busy that the next window may as well be drafted afresh.

        Its passes are at least as long as drafting takes, so nobody waits; and the draft is free for that window.
        """
        if not self.target.serves_others(self.request):
            return False
        return self.passes * self.draft.round_seconds <= self._pass_time.seconds(num_rows)

    def _occasion(self, inflight: InFlight, started: float) -> Occasion:
        """The pass that began at `started`, and when it should be over by what passes have taken lately."""
        num_rows = 1 + len(inflight.window)
        ready_by = started + self._pass_time.seconds(num_rows)
        return Occasion(inflight.head, inflight.window, self.request.gamma, ready_by)

    def _accept(self, inflight: InFlight, output: TargetOutput) -> Acceptance:
        acceptance = super()._accept(inflight, output)
        self._table.close()
        seconds = self.request.ledger.now() - self._pass_started
        self.draft.hold(partial(self._learn, len(inflight.window), acceptance.num_accepted, seconds))
        return acceptance

    def _learn(self, num_window: int, num_accepted: int, seconds: float) -> None:
        """Runs on the draft's thread: learn from a pass that was verified."""
        self._pass_time.observe(1 + num_window, seconds)
        self.planner.observe(num_window, num_accepted)

    def _next_window(self, inflight: InFlight, acceptance: Acceptance) -> tuple[NDArray[np.int64], str]:
        """The branch of the root that came true, if there is one; otherwise ask the draft and wait."""
        order = self._order()
        branch = self._table.get(acceptance.num_accepted, acceptance.next_token)
        if not order.limit or branch is None or not self.draft.is_working():
            return super()._next_window(inflight, acceptance)
        window = cut_window(branch, order)
        self.draft.hold(
            partial(self.draft.drafter.adopt, inflight.head, acceptance.num_accepted, acceptance.next_token, window)
        )
        return window, branch.source

    def close(self) -> None:
        """Stop branches that nobody will read."""
        self._table.close()
        self.draft.release()

    def _pass_on(self, guesses: ExitGuesses) -> None:
        """Runs on the target's thread, between prefix and suffix: hand the exit's guesses to the draft's device."""
        self.draft.post(partial(self._hear, guesses))

    def _hear(self, guesses: ExitGuesses) -> None:
        """Runs on the draft's thread: an exit of the pass under way has spoken."""
        assert self._expansion is not None
        self._expansion.hear(guesses)
