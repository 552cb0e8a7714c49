"""Growing branches beside the target's pass: rounds from the roots known so far until verification ends.

Runs on the draft worker, as jobs that never wait: `begin` when the pass starts, `hear` when an exit has spoken. Once
the likelier half has been prepared, the draft starts no round that would end after verification (by the times learned
so far). Between rounds it lets other jobs on its device go first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import ExitGuesses
from mirrorsd.runtime.decoding.draft_link import DraftLine
from mirrorsd.runtime.draft.drafter import Offer
from mirrorsd.runtime.draft.tree import Branch, BranchTable
from mirrorsd.runtime.policy.roots import Root, RootPlanner
from mirrorsd.runtime.policy.times import worth_by_rows

_FIRST_ROUND_GRACE = 0.5
"""Share of a round by which it may end late while too little is prepared: waiting still beats drafting anew."""
_ROOT_WORTH = 2.0
"""How much more than one more token of a branch its root is worth."""
_ENOUGH = 0.5
"""What the prepared branches' chances must be of all wanted ones'."""


class Occasion(NamedTuple):
    """One target pass beside which the draft may work.

    `window` follows the head token; the pass should be over at `ready_by` (seconds of the ledger's clock).
    """

    head: int
    window: NDArray[np.int64]
    gamma: int
    ready_by: float


class Expansion:
    """Prepares branches for one pass of the target."""

    def __init__(self, link: DraftLine, planner: RootPlanner, occasion: Occasion, table: BranchTable) -> None:
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
        due = self._offers(gamma)
        prepared = sum(branch.root.score for branch in self._wanted if branch.fed)
        is_prepared = prepared >= _ENOUGH * sum(branch.root.score for branch in self._wanted)
        grace = 0.0 if is_prepared and prepared else _FIRST_ROUND_GRACE * drafter.clock.shortest_seconds
        num_fed, lead_to = drafter.chain.num_fed, self._lead_to(due)
        worths = worth_by_rows([offer.worths for offer in due], max(0, lead_to - num_fed))
        max_rows = drafter.clock.best_rows(worths, self._occasion.ready_by + grace - drafter.now())
        if not max_rows:
            return False
        grown = drafter.grow(due, drafter.first_scratch_slot(), gamma, max_rows, lead_to)
        for branch in grown:
            self._table.publish(branch, gamma)
        if self._planner.is_early and drafter.chain.num_fed > num_fed:
            self._replan()
        return bool(grown)

    def _lead_to(self, due: Sequence[Offer]) -> int:
        """How far a round feeds the chain: to the window's end where the draft's own candidates count."""
        chain, first = self._drafter.chain, max((offer.branch.start for offer in due), default=0)
        return min(chain.num_known, self._drafter.session.capacity) if self._planner.is_early else first

    def _offers(self, gamma: int) -> list[Offer]:
        """What may grow, and what each guess is worth.

        That is the chance that the branch comes true, is right so far, and keeps the guess. The root's own row counts
        more: without it, a root that comes true leaves the target waiting.
        """
        rate, confirmations = self._planner.acceptance_rate, self._drafter.confirmations
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
