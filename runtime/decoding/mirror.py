"""Mirror decoding: while the target verifies one window, the draft prepares the next for each likely outcome.

The two devices meet once per step, at verification (Mirror-SD, arXiv 2510.13161, section 3).
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import ExitGuesses
from mirrorsd.runtime.decoding.expansion import Expansion, Occasion
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.decoding.serial import SerialSource
from mirrorsd.runtime.decoding.step import Acceptance, Found, InFlight, ReadPrompt
from mirrorsd.runtime.decoding.target_link import TargetLine
from mirrorsd.runtime.draft.drafter import cut_window
from mirrorsd.runtime.draft.tree import BranchTable, BranchWindow
from mirrorsd.runtime.policy.roots import RootPlanner
from mirrorsd.runtime.policy.times import PassClock


class MirrorPass:
    """What the draft prepares beside one pass of the target.

    Attributes:
        table: what it has prepared.
        is_listening: whether the exits count.
    """

    def __init__(
        self, serial: SerialSource, planner: RootPlanner, clock: PassClock, inflight: InFlight, table: BranchTable
    ) -> None:
        self.table, self.is_listening = table, planner.is_listening
        self._draft, self._ledger, self._gamma = serial.draft, serial.request.ledger, serial.request.gamma
        self._planner, self._clock, self._inflight = planner, clock, inflight
        self._started = 0.0
        self._expansion: Expansion | None = None

    def start(self) -> None:
        """See `Beside.start`. What can be worked out on the draft's thread is: here, the target's device waits."""
        self._started = self._ledger.now()
        self._draft.release(self._prepare)

    def hear(self, guesses: ExitGuesses) -> None:
        """See `Beside.hear`: hand the exit's guesses to the draft's device."""
        self._draft.post(partial(self._pass_on, guesses))

    def end(self, acceptance: Acceptance) -> None:
        """See `Beside.end`."""
        self.table.close()
        self._draft.hold(partial(self._learn, acceptance.num_accepted, self._ledger.now() - self._started))

    def _prepare(self) -> None:
        """Runs on the draft's thread: the pass should be over by what passes have taken lately."""
        head, window = self._inflight
        occasion = Occasion(head, window, self._gamma, self._started + self._clock.seconds(1 + len(window)))
        self._expansion = Expansion(self._draft, self._planner, occasion, self.table)
        self._expansion.begin()

    def _pass_on(self, guesses: ExitGuesses) -> None:
        """Runs on the draft's thread."""
        assert self._expansion is not None
        self._expansion.hear(guesses)

    def _learn(self, num_accepted: int, seconds: float) -> None:
        """Runs on the draft's thread: learn from a pass that was verified."""
        num_window = len(self._inflight.window)
        self._clock.observe(1 + num_window, seconds)
        self._planner.observe(num_window, num_accepted)


class MirrorSource:
    """The branch of the outcome that came true; where there is none, what `serial` asks the draft for."""

    name = "mirror"

    def __init__(
        self,
        serial: SerialSource,
        target: TargetLine,
        planner: RootPlanner,
        new_table: Callable[[], BranchTable] = BranchTable,
    ) -> None:
        self.planner = planner
        self._serial, self._target, self._new_table = serial, target, new_table
        self._clock = PassClock()
        self._pass: MirrorPass | None = None

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """See `SerialSource.start`."""
        return self._serial.start(read_prompt)

    def begin(self, inflight: InFlight) -> MirrorPass | None:
        """Prepare for what comes after `inflight`.

        Not while the target serves another conversation: the next window is then drafted beside its pass.
        """
        self._pass = None
        draft, is_free = self._serial.draft, not self._target.serves_others(self._serial.request)
        if is_free and self._serial.order.limit and draft.has_text and draft.is_working():
            self._pass = MirrorPass(self._serial, self.planner, self._clock, inflight, self._new_table())
        return self._pass

    def is_prepared(self, acceptance: Acceptance) -> bool:
        """Whether the branch of the root that came true is there."""
        return self._branch(acceptance) is not None

    def _branch(self, acceptance: Acceptance) -> BranchWindow | None:
        return self._pass.table.get(acceptance.num_accepted, acceptance.next_token) if self._pass else None

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The branch of the root that came true, if there is one; otherwise ask the draft and wait."""
        order, found = self._serial.order, self._branch(acceptance)
        if not order.limit or found is None or not self._serial.draft.is_working():
            return self._serial.next(inflight, acceptance)
        forced = self._serial.forced(inflight, acceptance)
        if forced is not None:
            return forced
        window = cut_window(found, order)
        self._serial.adopt(inflight, acceptance, window)
        return self._serial.allowed(Found(window, found.source))

    def observe(self, step: StepRecord) -> None:
        """See `SerialSource.observe`."""
        self._serial.observe(step)

    def close(self) -> None:
        """Stop branches that nobody will read."""
        if self._pass is not None:
            self._pass.table.close()
        self._serial.draft.release()
