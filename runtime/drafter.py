"""The draft's side of the pipeline: the chain of known tokens, branches beyond it, and the draft cache by index.

Owned by the draft worker: no method may be called from two threads. Cache slot `p` holds the token at position `p` for
the chain (committed text, then the current window); slots after the chain are scratch for branches.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.branches import Branch, BranchTable
from mirrorsd.runtime.choosing import TokenChooser
from mirrorsd.runtime.draft_session import DraftSession, RowBlock, TipGuesses, check_guesses
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.roots import Root

_CHAIN_SLACK = 64  # a window may be known past the last slot that could ever be fed
NO_TOKENS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Drafter:
    """Keeps the draft in step with the committed text and grows windows and branches.

    Attributes:
        num_fed: leading chain tokens whose keys and values are cached.
        num_chain: known chain tokens: committed text, head token, window.
    """

    def __init__(self, session: DraftSession, round_rows: int) -> None:
        self.session = session
        self.num_fed = 0
        self.num_chain = 0
        self._round_rows = min(round_rows, session.max_rows)
        self._chain = np.zeros(session.capacity + _CHAIN_SLACK, dtype=np.int64)
        self._chooser: TokenChooser | None = None
        self._ledger = Ledger()
        self._branches: dict[tuple[int, int], Branch] = {}

    def prefill(self, tokens: NDArray[np.int64], chooser: TokenChooser, ledger: Ledger) -> None:
        """Start a request: keep the longest common prefix of the cache, feed the rest but the head token."""
        self._chooser, self._ledger = chooser, ledger
        self._branches = {}
        self.num_fed = longest_common_prefix(self._chain[: self.num_fed], tokens[:-1])
        self.num_chain = len(tokens)
        self._chain[: len(tokens)] = tokens
        self._feed_chain(len(tokens) - 1)

    def forget(self) -> None:
        """Start over with an empty cache, after a failure that left it unknown."""
        self.num_fed = self.num_chain = 0
        self._branches = {}

    def fresh(self, gamma: int, passes: int) -> NDArray[np.int64]:
        """Continue the chain from its head token with up to `gamma` tokens in `passes` passes."""
        head = self.num_chain - 1
        gamma = min(gamma, self.session.capacity - self.num_chain)
        if head - self.num_fed >= self._round_rows:
            self._feed_chain(head)
        branch = Branch(Root(0, int(self._chain[head]), 1.0, "fresh"), head)
        for _ in range(passes):
            if len(branch.window) >= gamma or not self._round([branch], head + len(branch.fed), gamma, "fresh"):
                break
        window = np.asarray(branch.window[:gamma], dtype=np.int64)
        self._extend_chain(branch, window)
        return window

    def expand(self, roots: Sequence[Root], head: int, gamma: int, table: BranchTable) -> None:
        """Grow a branch for each root, best roots first, until all are `gamma` long or the table is closed."""
        branches = [Branch(root, head + root.row + 1) for root in roots]
        self._branches = {(branch.root.row, branch.root.token): branch for branch in branches}
        scratch = self.num_chain
        while not table.is_closed:
            due = [branch for branch in branches if len(branch.window) < gamma]
            grown = self._round(due, scratch, gamma, "expand")
            if not grown:
                return
            for branch in grown:
                table.publish(branch, gamma)
                scratch = max(scratch, branch.slots[-1] + 1)

    def adopt(self, head: int, num_accepted: int, token: int, window: NDArray[np.int64]) -> None:
        """Make the verified text and the next window the chain; move the branch's cache rows to their positions.

        Window tokens `1 .. num_accepted` stay where they are; the rest of the old window is forgotten by number. If
        the root `(num_accepted, token)` has a branch, its fed rows that agree with `window` become chain rows.

        With the head at position 10 and two tokens accepted, the new head stands at 13. A branch with fed tokens
        `[token, 4, 5]` in slots 17, 20, 21 and `window = [4, 6]` keeps two rows: slots 17, 20 move to 13, 14.
        """
        new_head = head + num_accepted + 1
        branch = self._branches.get((num_accepted, token))
        self._branches = {}
        self.num_fed = min(self.num_fed, new_head)
        self._chain[new_head] = token
        self.num_chain = new_head + 1
        if branch is not None and branch.fed:
            self._extend_chain(branch, window)
        else:
            self._append(window)

    def resolve(
        self, head: int, num_accepted: int, token: int, gamma: int, passes: int
    ) -> tuple[NDArray[np.int64], str]:
        """The next window when the scheduler found none: a branch that finished late, or a fresh one.

        Returns:
            The window and its source: `late` or `fresh`.
        """
        branch = self._branches.get((num_accepted, token))
        if branch is not None and branch.window:
            window = np.asarray(branch.window[:gamma], dtype=np.int64)
            self.adopt(head, num_accepted, token, window)
            return window, "late"
        self.adopt(head, num_accepted, token, NO_TOKENS)
        return self.fresh(gamma, passes), "fresh"

    def _round(self, due: Sequence[Branch], scratch: int, gamma: int, label: str) -> list[Branch]:
        """One pass: feed the chain tokens that the branches need, and the guesses of as many branches as fit."""
        if not due:
            return []
        num_lead = max(0, max(branch.start for branch in due) - self.num_fed)
        room = min(self._round_rows - num_lead, self.session.capacity - scratch, self.session.max_tips)
        blocks = [self._chain_block(self.num_fed + num_lead)] if num_lead else []
        placed: list[Branch] = []
        num_rows = num_lead
        for branch in due:
            size = min(len(branch.guesses), 1 + gamma - len(branch.fed))
            if num_rows - num_lead + size > room:
                break
            branch.guesses = branch.guesses[:size]
            blocks.append(self._branch_block(branch, num_lead))
            placed.append(branch)
            num_rows += size
        if not placed:
            return []
        with self._ledger.time("draft", label):
            guesses = self._run(blocks, range(num_lead, num_rows))
            self._keep_chain(self.num_fed + num_lead)
            self._absorb(placed, guesses, num_lead, scratch)
        return placed

    def _branch_block(self, branch: Branch, num_lead: int) -> RowBlock:
        """Rows for the branch's guesses: they see the chain before its start, and the branch's own cache slots."""
        return RowBlock(
            tokens=branch.guesses,
            first_position=branch.start + len(branch.fed),
            chain_visible=min(branch.start, self.num_fed),
            extra_slots=branch.slots,
            lead_rows=min(max(0, branch.start - self.num_fed), num_lead),
        )

    def _absorb(self, placed: Sequence[Branch], guesses: TipGuesses, num_lead: int, scratch: int) -> None:
        rows: list[int] = []
        slots: list[int] = []
        first_tip = 0
        for branch in placed:
            size = len(branch.guesses)
            tips = slice(first_tip, first_tip + size)
            predicted = self._predict(guesses, tips, branch.start + len(branch.fed))
            kept = branch.absorb(predicted[:, 0].tolist(), predicted[:, 1:].tolist())
            new_slots = range(scratch + len(slots), scratch + len(slots) + kept)
            rows += range(num_lead + first_tip, num_lead + first_tip + kept)
            slots += new_slots
            branch.slots += new_slots
            first_tip += size
        self.session.keep_rows(rows, slots)

    def _predict(self, guesses: TipGuesses, tips: slice, first_position: int) -> NDArray[np.int64]:
        """Predicted tokens `[size, 1 + s]` of the tips that stand at `first_position` onwards."""
        assert self._chooser is not None
        ids, logprobs = guesses.ids[tips], guesses.logprobs[tips]
        size, ahead = ids.shape[:2]
        positions = first_position + 1 + np.arange(size)[:, None] + np.arange(ahead)[None, :]
        return self._chooser.guess(ids, logprobs, positions)

    def _extend_chain(self, branch: Branch, window: NDArray[np.int64]) -> None:
        """Append `window` after the head; the branch's fed rows that agree with it become cached chain rows."""
        agreed = 1 + longest_common_prefix(np.asarray(branch.fed[1:], dtype=np.int64), window)
        num_kept = min(agreed, len(branch.slots))
        destinations = range(branch.start, branch.start + num_kept)
        if branch.slots[:num_kept] != list(destinations):
            self.session.move_slots(branch.slots[:num_kept], destinations)
        self.num_fed = branch.start + num_kept
        self._append(window)

    def _append(self, window: NDArray[np.int64]) -> None:
        self._chain[self.num_chain : self.num_chain + len(window)] = window
        self.num_chain += len(window)

    def _feed_chain(self, stop: int) -> None:
        while self.num_fed < stop:
            chunk_stop = min(self.num_fed + self.session.prefill_rows, stop)
            with self._ledger.time("draft", "prefill"):
                self._run([self._chain_block(chunk_stop)], [chunk_stop - self.num_fed - 1])
                self._keep_chain(chunk_stop)

    def _chain_block(self, stop: int) -> RowBlock:
        return RowBlock(self._chain[self.num_fed : stop].tolist(), self.num_fed, self.num_fed)

    def _keep_chain(self, stop: int) -> None:
        if stop > self.num_fed:
            self.session.keep_rows(range(stop - self.num_fed), range(self.num_fed, stop))
            self.num_fed = stop

    def _run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        return check_guesses(self.session.run(blocks, tip_rows), len(tip_rows), self.session.shape)


def longest_common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """Number of leading equal tokens.

    >>> longest_common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
    2
    """
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
