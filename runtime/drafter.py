"""The draft's side of the pipeline: windows after the chain, branches beside it, and the cache moves between them.

Owned by the draft worker: no method may be called from two threads.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.branches import Branch
from mirrorsd.runtime.choosing import TokenChooser
from mirrorsd.runtime.draft_chain import NO_TOKENS, DraftChain
from mirrorsd.runtime.draft_session import DraftSession, RowBlock, TipGuesses
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.roots import Root
from mirrorsd.runtime.round_clock import RoundClock


class Drafter:
    """Keeps the draft in step with the committed text; grows windows and branches."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.chain = DraftChain(session)
        self.clock = RoundClock(session.round_sizes)
        self.branches: dict[tuple[int, int], Branch] = {}
        self._max_rows = max(session.round_sizes)
        self._chooser: TokenChooser | None = None
        self._ledger = Ledger()

    def prefill(self, tokens: NDArray[np.int64], chooser: TokenChooser, ledger: Ledger) -> None:
        """Start a request: keep the longest common prefix of the cache, feed the rest but the head token."""
        self._chooser, self._ledger = chooser, ledger
        self.session.use_noise(chooser.noise_source())
        self.branches = {}
        self.chain.restart(tokens)
        with ledger.time("draft", "prefill"):
            self.chain.feed(len(tokens) - 1)

    def now(self) -> float:
        """Seconds, by the clock of the current request."""
        return self._ledger.now()

    def forget(self) -> None:
        """Start over with an empty cache, after a failure that left it unknown."""
        self.chain.forget()
        self.branches = {}

    def fresh(self, gamma: int, passes: int) -> NDArray[np.int64]:
        """Continue the chain from its head token with up to `gamma` tokens in `passes` passes."""
        chain, head = self.chain, self.chain.head
        gamma = min(gamma, self.session.capacity - chain.num_known)
        if head - chain.num_fed >= self._max_rows:
            chain.feed(head)
        branch = Branch(Root(0, chain.token(head), 1.0, "fresh"), head)
        for _ in range(passes):
            is_done = branch.num_window >= gamma
            if is_done or not self.grow([branch], head + len(branch.fed), gamma, self._max_rows, "fresh"):
                break
        window = np.asarray(branch.window[:gamma], dtype=np.int64)
        self._extend_chain(branch, window)
        return window

    def adopt(self, head: int, num_accepted: int, token: int, window: NDArray[np.int64]) -> None:
        """Make the verified text and the next window the chain; move the branch's cache rows to their positions.

        Window tokens `1 .. num_accepted` stay where they are; the rest of the old window is forgotten by number. If
        the root `(num_accepted, token)` has a branch, its fed rows that agree with `window` become chain rows.

        With the head at position 10 and two tokens accepted, the new head stands at 13. A branch with fed tokens
        `[token, 4, 5]` in slots 17, 20, 21 and `window = [4, 6]` keeps two rows: slots 17, 20 move to 13, 14.
        """
        branch = self.branches.get((num_accepted, token))
        self.branches = {}
        self.chain.cut(head + num_accepted + 1)
        self.chain.append([token])
        if branch is not None and branch.fed:
            self._extend_chain(branch, window)
        else:
            self.chain.append(window)

    def resolve(
        self, head: int, num_accepted: int, token: int, gamma: int, passes: int
    ) -> tuple[NDArray[np.int64], str]:
        """The next window when the scheduler found none: a branch that finished late, or a fresh one.

        Returns:
            The window and its source: `late` or `fresh`.
        """
        branch = self.branches.get((num_accepted, token))
        if branch is not None and branch.fed:
            window = np.asarray(branch.window[:gamma], dtype=np.int64)
            self.adopt(head, num_accepted, token, window)
            return window, "late"
        self.adopt(head, num_accepted, token, NO_TOKENS)
        return self.fresh(gamma, passes), "fresh"

    def feed_window(self) -> None:
        """Feed the window's unfed tokens, so that the draft has candidates after every one of them."""
        chain = self.chain
        stop = min(chain.num_known, self.session.capacity)
        num_rows = stop - chain.num_fed
        if not 0 < num_rows <= min(self._max_rows, self.session.max_tips):
            return
        with self._ledger.time("draft", "expand"):
            tips = chain.run([chain.block(stop)], range(num_rows))
            first = chain.num_fed
            chain.keep(stop)
            chain.note_candidates(first, tips.ids[:, 0], tips.logprobs[:, 0])

    def first_scratch_slot(self) -> int:
        """The first cache slot after the chain and all branches."""
        used = [branch.slots[-1] + 1 for branch in self.branches.values() if branch.slots]
        return max([self.chain.num_known, *used])

    def grow(self, due: Sequence[Branch], scratch: int, gamma: int, max_rows: int, label: str) -> list[Branch]:
        """One round: feed the chain tokens that the branches need, and the guesses of as many branches as fit.

        Args:
            due: branches to grow, most wanted first.
            scratch: first free cache slot.
            gamma: most tokens after a root.
            max_rows: most rows of this round.
            label: what the ledger calls it.

        Returns:
            The branches that grew; empty if not even the first one fits.
        """
        if not due:
            return []
        num_lead = max(0, max(branch.start for branch in due) - self.chain.num_fed)
        room = min(max_rows - num_lead, self.session.capacity - scratch, self.session.max_tips)
        blocks = [self.chain.block(self.chain.num_fed + num_lead)] if num_lead else []
        placed: list[Branch] = []
        num_rows = num_lead
        for branch in due:
            size = min(len(branch.guesses), 1 + gamma - len(branch.fed))
            if num_rows - num_lead + size > room:
                break
            branch.guesses = branch.guesses[:size]
            blocks.append(self._block(branch, num_lead))
            placed.append(branch)
            num_rows += size
        if placed:
            started = self.now()
            with self._ledger.time("draft", label):
                tips = self.chain.run(blocks, range(num_lead, num_rows))
                self._absorb(placed, tips, num_lead, scratch)
            self.clock.observe(num_rows, self.now() - started)
        return placed

    def _block(self, branch: Branch, num_lead: int) -> RowBlock:
        """Rows for the branch's guesses: they see the chain before its start, and the branch's own cache slots."""
        num_fed = self.chain.num_fed
        return RowBlock(
            tokens=branch.guesses,
            first_position=branch.start + len(branch.fed),
            chain_visible=min(branch.start, num_fed),
            extra_slots=branch.slots,
            lead_rows=min(max(0, branch.start - num_fed), num_lead),
        )

    def _absorb(self, placed: Sequence[Branch], tips: TipGuesses, num_lead: int, scratch: int) -> None:
        """Take in what a round predicted; cache the rows of the chain tokens it led with, and of confirmed guesses."""
        chain = self.chain
        rows, slots = [*range(num_lead)], [*range(chain.num_fed, chain.num_fed + num_lead)]
        tips = TipGuesses(tips.ids.copy(), tips.logprobs.copy())
        predicted = self._predict(tips, placed)
        first_tip = 0
        for branch in placed:
            last_tip = first_tip + len(branch.guesses)
            own = TipGuesses(tips.ids[first_tip:last_tip], tips.logprobs[first_tip:last_tip])
            kept = branch.absorb(predicted[first_tip:last_tip], own)
            new_slots = range(scratch, scratch + kept)
            rows += range(num_lead + first_tip, num_lead + first_tip + kept)
            slots += new_slots
            branch.slots += new_slots
            first_tip = last_tip
            scratch += kept
        self.session.keep_rows(rows, slots)
        chain.num_fed += num_lead

    def _predict(self, tips: TipGuesses, placed: Sequence[Branch]) -> NDArray[np.int64]:
        """Predicted tokens `[R, 1 + s]` of all tips, those of the branches' guesses one after another."""
        assert self._chooser is not None
        if not self._chooser.is_sampling:
            return tips.ids[..., 0]
        starts = [(branch.start + len(branch.fed), len(branch.guesses)) for branch in placed]
        tip_positions = np.concatenate([np.arange(start, start + size) for start, size in starts])
        positions = tip_positions[:, None] + 1 + np.arange(tips.ids.shape[1])[None, :]
        return self._chooser.guess(tips.ids, tips.logprobs, positions)

    def _extend_chain(self, branch: Branch, window: NDArray[np.int64]) -> None:
        """Append `window` after the head; the branch's fed rows that agree with it become cached chain rows."""
        tokens = window.tolist()
        num_kept = min(len(branch.slots), 1 + len(tokens))
        while num_kept > 1 and branch.fed[1:num_kept] != tokens[: num_kept - 1]:
            num_kept -= 1
        destinations = range(branch.start, branch.start + num_kept)
        if branch.slots[:num_kept] != list(destinations):
            self.session.move_slots(branch.slots[:num_kept], destinations)
        self.chain.num_fed = branch.start + num_kept
        self.chain.append(window)
        num_noted = min(len(branch.candidate_ids), len(window) + 1)
        if num_noted:
            ids, logprobs = branch.candidate_ids[:num_noted], branch.candidate_logprobs[:num_noted]
            self.chain.note_candidates(branch.start, ids, logprobs)
