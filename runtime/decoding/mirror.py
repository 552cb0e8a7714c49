"""Mirror decoding: while the target verifies one window, the draft prepares the next for each likely outcome.

The two devices meet once per step, at verification (Mirror-SD, arXiv 2510.13161, section 3).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.links import DraftLink, TargetLink
from mirrorsd.runtime.decoding.protocol import Beside, Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.request import Acceptance, StepRecord
from mirrorsd.runtime.decoding.step import SerialSource
from mirrorsd.runtime.draft.drafter import Offer, cut_window
from mirrorsd.runtime.draft.tree import Branch, BranchWindow
from mirrorsd.runtime.ledger import Estimate, ExitGuesses, Ledger
from mirrorsd.runtime.policy.roots import Root, RootPlanner
from mirrorsd.runtime.policy.windows import worth_by_rows

_ROOT_WORTH = 2.0
"""How much more than one more token of a branch its root is worth. 1: 0.99 to 1.01. 4: 1.00 to 1.02."""


class PassClock:
    """How long the target takes to some point of a pass, by number of rows."""

    def __init__(self) -> None:
        self._estimates: dict[int, Estimate] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn that it took `seconds` with `num_rows` rows."""
        self._estimates.setdefault(num_rows, Estimate()).observe(seconds)

    def seconds(self, num_rows: int) -> float:
        """What it takes, by the nearest number of rows that was measured; infinite before the first.

        >>> clock = PassClock(); clock.observe(2, 0.5); clock.observe(8, 0.7)
        >>> clock.seconds(3), clock.seconds(6), PassClock().seconds(1)
        (0.5, 0.7, inf)
        """
        if not self._estimates:
            return float("inf")
        nearest = min(self._estimates, key=lambda rows: abs(rows - num_rows))
        return self._estimates[nearest].seconds or float("inf")


class BranchTable:
    """Windows by root, written by the draft worker and read by the scheduler while the draft still works."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._is_closed = ledger, False
        self._windows: dict[tuple[int, int], BranchWindow] = {}

    def publish(self, branch: Branch, gamma: int) -> None:
        """Make a branch's current window visible, unless the pass has ended; a later call replaces it."""
        if self._ledger.now() < self._ledger.pass_ends:
            self._windows[branch.root.row, branch.root.token] = branch.published(gamma)

    def get(self, row: int, token: int) -> BranchWindow | None:
        """The window prepared for the root, or None."""
        return self._windows.get((row, token))

    def close(self) -> None:
        """Tell the draft worker that verification is over: start no further round."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Whether the scheduler has stopped reading."""
        return self._is_closed or self._ledger.now() >= self._ledger.pass_ends


class Occasion(NamedTuple):
    """One target pass beside which the draft may work.

    `window` follows the head token; the pass should be over at `ready_by` (seconds of the ledger's clock).
    """

    head: int
    window: NDArray[np.int64]
    gamma: int
    ready_by: float


class MirrorPass(Beside):
    """What the draft prepares beside one pass of the target.

    Attributes:
        table: what it has prepared.
        is_listening: whether the exits count.
    """

    def __init__(self, serial: SerialSource, planner: RootPlanner, clock: PassClock, inflight: InFlight) -> None:
        self._draft, self._ledger, self._gamma = serial.draft, serial.request.ledger, serial.request.speculation.gamma
        self.table, self.is_listening = BranchTable(self._ledger), planner.is_listening
        self._planner, self._clock, self._inflight = planner, clock, inflight
        self._started = 0.0
        self._expansion: Expansion | None = None

    def start(self) -> None:
        """Work out on the draft's thread what can be: here, the target's device waits."""
        self._started = self._ledger.now()
        self._draft.release(self._prepare)

    def hear(self, guesses: ExitGuesses) -> None:
        """Hand the exit's guesses to the draft's device."""
        self._draft.post(partial(self._pass_on, guesses))

    def end(self, acceptance: Acceptance) -> None:
        self.table.close()
        self._draft.hold(partial(self._learn, acceptance.num_accepted, self._ledger.now() - self._started))

    def _prepare(self) -> None:
        """Runs on the draft's thread: the pass should be over by what passes have taken lately."""
        head, window = self._inflight.head, self._inflight.window
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
        self._planner.acceptance_rate.observe(num_window, num_accepted)


class MirrorSource(WindowSource):
    """The branch of the outcome that came true; where there is none, what `serial` asks the draft for."""

    name = "mirror"

    def __init__(self, serial: SerialSource, target: TargetLink, planner: RootPlanner) -> None:
        self.planner = planner
        self._serial, self._target = serial, target
        self._clock = PassClock()
        self._pass: MirrorPass | None = None

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        return self._serial.start(read_prompt)

    def begin(self, inflight: InFlight) -> MirrorPass | None:
        """Prepare for what comes after `inflight`.

        Not while the target serves another conversation: the next window is then drafted beside its pass.
        """
        self._serial.begin(inflight)
        self._pass = None
        draft, is_free = self._serial.draft, not self._target.serves_others(self._serial.request)
        if is_free and self._serial.order.limit and draft.has_text and draft.is_working():
            self._pass = MirrorPass(self._serial, self.planner, self._clock, inflight)
        return self._pass

    def is_prepared(self, acceptance: Acceptance) -> bool:
        """Whether the branch of the root that came true is there."""
        return self._branch(acceptance) is not None

    def _branch(self, acceptance: Acceptance) -> BranchWindow | None:
        token, *behind = acceptance.rest
        found = self._pass.table.get(acceptance.num_accepted, token) if self._pass else None
        return None if found is None else found.after(behind)

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
        return self._serial.with_siblings(self._serial.allowed(Found(window, found.source)), found)

    def observe(self, step: StepRecord) -> None:
        self._serial.observe(step)

    def close(self) -> None:
        """Stop branches that nobody will read."""
        if self._pass is not None:
            self._pass.table.close()
        self._serial.draft.release()


class Expansion:
    """Prepares branches for one pass of the target: rounds from the roots known so far until verification ends.

    Runs on the draft worker, as jobs that never wait: `begin` when the pass starts, `hear` when an exit has spoken.
    The draft starts no round that would end after verification, by the times learned so far. Between rounds it lets
    other jobs on its device go first.
    """

    def __init__(self, link: DraftLink, planner: RootPlanner, occasion: Occasion, table: BranchTable) -> None:
        self._link, self._drafter = link, link.drafter
        self._planner, self._occasion, self._table = planner, occasion, table
        self._by_exit: ExitGuesses | None = None
        self._wanted: list[Branch] = []

    def begin(self) -> None:
        """Start from the draft's own candidates; nothing to do where only the exit's count."""
        if self._planner.is_early and not self._table.is_closed:
            self._replan()
            self._work()

    def hear(self, guesses: ExitGuesses) -> None:
        """Take in what an exit says and go on where it points."""
        if not self._table.is_closed:
            self._by_exit = guesses
            self._replan()
            self._work()

    def _replan(self) -> None:
        """Ask for roots with all that is known; branches that exist keep what they have."""
        occasion = self._occasion
        by_draft = None
        if self._planner.is_early:
            by_draft = self._drafter.chain.candidates(occasion.head, occasion.head + len(occasion.window) + 1)
        roots = self._planner.plan(occasion.head, occasion.window, by_draft, self._by_exit)
        self._wanted = [self._branch(root) for root in roots]

    def _branch(self, root: Root) -> Branch:
        branches = self._drafter.branches
        branch = branches.get((root.row, root.token))
        if branch is None:
            branch = branches[root.row, root.token] = Branch(root, self._occasion.head + root.row + 1)
        else:
            branch.root = branch.root._replace(score=root.score)
        return branch

    def _work(self) -> None:
        """Rounds until the table is closed, every wanted branch is full, time is up, or another job waits."""
        while not self._table.is_closed and self._round():
            if self._link.has_waiting() and not self._table.is_closed:
                self._link.post(self._work)
                return

    def _round(self) -> bool:
        """One round over the branches that promise most per row; False if there is nothing to do or no time."""
        gamma, drafter = self._occasion.gamma, self._drafter
        if not self._wanted:
            return self._lead()
        due = self._offers(gamma)
        num_fed, lead_to = drafter.chain.num_fed, self._lead_to(due)
        worths = worth_by_rows([offer.worths for offer in due], max(0, lead_to - num_fed))
        max_rows = drafter.clock.best_rows(worths, self._occasion.ready_by - drafter.now())
        if not max_rows:
            return False
        grown = drafter.grow(due, drafter.first_scratch_slot(), gamma, max_rows, lead_to)
        for branch in grown:
            self._table.publish(branch, gamma)
        if self._planner.is_early and drafter.chain.num_fed > num_fed:
            self._replan()
        return bool(grown)

    def _lead(self) -> bool:
        """A round for the window alone, of which the draft knows nothing where it is not its own: roots follow it."""
        drafter, planner = self._drafter, self._planner
        worths = np.array([0.0, float(planner.is_early)])
        if not drafter.clock.best_rows(worths, self._occasion.ready_by - drafter.now()):
            return False
        is_fed = drafter.lead(drafter.chain.num_known)
        if is_fed:
            self._replan()
        return is_fed

    def _lead_to(self, due: Sequence[Offer]) -> int:
        """How far a round feeds the chain: to the window's end where the draft's own candidates count."""
        chain, first = self._drafter.chain, max((offer.branch.start for offer in due), default=0)
        return min(chain.num_known, self._drafter.session.capacity) if self._planner.is_early else first

    def _offers(self, gamma: int) -> list[Offer]:
        """What may grow, and what each guess is worth.

        That is the chance that the branch comes true, is right so far, and keeps the guess. The root's own row counts
        more: without it, a root that comes true leaves the target waiting.
        """
        rate, confirmations = self._planner.acceptance_rate.value, self._drafter.confirmations
        kept = confirmations.chances(1 + self._drafter.session.shape.num_streams)
        worths = [*(kept * rate ** np.arange(len(kept))).tolist()]
        offers = []
        for branch in self._wanted:
            score, num_fed = branch.root.score, len(branch.fed)
            if not num_fed:
                offers.append(Offer(branch, [_ROOT_WORTH * score]))
            elif branch.num_window < gamma:
                chance = score * rate**num_fed
                offers.append(Offer(branch, [chance * worth for worth in worths[: len(branch.guesses)]]))
        return offers
