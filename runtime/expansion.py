"""Growing branches beside the target's pass: rounds from the roots known so far until verification ends.

Runs on the draft worker. The draft never waits for the suffix: it stops when the table is closed, and starts no round
that would end after verification (by the times learned so far), once something has been prepared.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.branches import Branch, BranchTable
from mirrorsd.runtime.drafter import Drafter
from mirrorsd.runtime.planner import Candidates, RootPlanner
from mirrorsd.runtime.roots import Root
from mirrorsd.runtime.workers import Mailbox


class Occasion(NamedTuple):
    """One target pass beside which the draft may work: window after the head token, and when it should be over."""

    head: int
    window: NDArray[np.int64]
    gamma: int
    ready_by: float


class Expansion:
    """Prepares branches for one pass of the target."""

    def __init__(
        self, drafter: Drafter, planner: RootPlanner, occasion: Occasion, table: BranchTable, mailbox: Mailbox
    ) -> None:
        self._drafter, self._planner, self._occasion = drafter, planner, occasion
        self._table, self._mailbox = table, mailbox
        self._by_exit: Candidates | None = None
        self._scratch = 0
        self._wanted: list[Branch] = []

    def run(self) -> None:
        """Rounds until the table is closed, every wanted branch is full, or no round would end in time."""
        self._scratch = self._drafter.chain.num_known
        if self._table.is_closed:
            return
        if self._planner.is_early:
            self._drafter.feed_window()
            self._replan()
        else:
            self._listen(is_waiting=True)
        while not self._table.is_closed:
            if not self._round() and not self._listen(is_waiting=True):
                return
            self._listen(is_waiting=False)

    def _listen(self, *, is_waiting: bool) -> bool:
        """Take in the newest exit message, if there is one (or once there is one); False when no more will come."""
        if not self._planner.is_listening:
            return False
        message = self._mailbox.take() if is_waiting else self._mailbox.newest()
        if message is None:
            return False
        self._by_exit = (message.ids, message.logprobs)
        self._replan()
        return True

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

    def _round(self) -> bool:
        """One round over the branches that promise most per row; False if there is nothing to do or no time."""
        gamma, drafter = self._occasion.gamma, self._drafter
        due = [branch for branch in self._wanted if len(branch.window) < gamma]
        due.sort(key=self._promise(), reverse=True)
        has_something = any(branch.fed for branch in self._wanted)
        max_rows = drafter.clock.rows_until(self._occasion.ready_by)
        if has_something and not max_rows:
            return False
        max_rows = max_rows or min(drafter.session.round_sizes)
        grown = drafter.grow(due, self._scratch, gamma, max_rows, "expand")
        for branch in grown:
            self._table.publish(branch, gamma)
            self._scratch = max(self._scratch, branch.slots[-1] + 1)
        return bool(grown)

    def _promise(self) -> Callable[[Branch], Any]:
        """Expected gain per row: the root's chance, times the chance that what is there already is right."""
        rate = self._planner.acceptance_rate
        return lambda branch: branch.root.score * np.power(rate, len(branch.window)) / len(branch.guesses)
