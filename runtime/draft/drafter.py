"""The draft's side of the pipeline: windows after the chain, branches beside it, and the cache moves between them.

Owned by the draft worker: no method may be called from two threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.backends.protocol import DraftSession, RowBlock, TipGuesses
from mirrorsd.runtime.draft.tree import NO_TOKENS, Branch, BranchWindow, DraftChain
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.runtime.policy.windows import Confirmations, RoundClock, Share, WindowLength, WindowOrder, share_out
from mirrorsd.runtime.sampling.chooser import TokenChooser

_LEAST_SHARE = -20.0
"""In logs, behind the best: what a row's only candidate leaves to others."""


class Offer(NamedTuple):
    """A branch that may grow, and what feeding each of its guesses is worth: never more than the guess before it."""

    branch: Branch
    worths: Sequence[float]


class Drafter:
    """Keeps the draft in step with the committed text; grows windows and branches."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.chain = DraftChain(session)
        self.clock = RoundClock(session.round_sizes)
        self.confirmations = Confirmations(session.shape.num_streams)
        self.branches: dict[tuple[int, int], Branch] = {}
        self._max_rows = max(session.round_sizes)
        self._chooser: TokenChooser | None = None
        self._ledger = Ledger()

    def prefill(self, tokens: NDArray[np.int64], chooser: TokenChooser, ledger: Ledger) -> None:
        """Start a request: keep the longest common prefix of the cache, feed the rest but the head token.

        What is few enough to go with the first round is left to it.
        """
        self._chooser, self._ledger = chooser, ledger
        chooser.is_heard_by_draft = self.session.shape.num_noise_rows > 0
        self.session.use_noise(chooser.noise_source())
        self.branches = {}
        self.chain.restart(tokens)
        if self.chain.head - self.chain.num_fed >= self._max_rows:
            with ledger.time("draft", "prefill"):
                self.chain.feed(self.chain.head)

    def now(self) -> float:
        """Seconds, by the clock of the current request."""
        return self._ledger.now()

    def forget(self) -> None:
        """Start over with an empty cache, after a failure that left it unknown."""
        self.chain.forget()
        self.branches = {}

    def fresh(self, order: WindowOrder, hidden: NDArray[np.floating] | None = None) -> NDArray[np.int64]:
        """Continue the chain from its head token; `hidden [F]`: the target's of the token before, where it is known."""
        chain, head = self.chain, self.chain.head
        limit = min(order.limit, self.session.capacity - chain.num_known)
        if head - chain.num_fed >= self._max_rows:
            chain.feed(head)
        branch = Branch(Root(0, chain.token(head), 1.0, "fresh"), head, hidden)
        for number in range(order.passes):
            if branch.num_window >= limit or (number and not self._is_worthwhile(branch, number, order.length)):
                break
            whole = Offer(branch, [1.0] * len(branch.guesses))
            if not self.grow([whole], head + len(branch.fed), limit, self._max_rows, head):
                break
        window = cut_window(branch.published(limit), order)
        self._extend_chain(branch, window)
        return window

    def _is_worthwhile(self, branch: Branch, passes: int, length: WindowLength | None) -> bool:
        seconds = self.clock.shortest_seconds
        return length is None or length.is_pass_worthwhile(branch.shares, len(branch.fed), passes, seconds)

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
        self,
        head: int,
        num_accepted: int,
        token: int,
        order: WindowOrder,
        hidden: NDArray[np.floating] | None = None,
    ) -> tuple[NDArray[np.int64], str]:
        """The next window when the scheduler found none: a branch that finished late, or a fresh one.

        `hidden [F]` is what the target's lower layers have made of the last accepted token, where it is known.

        Returns:
            The window and its source: `late` or `fresh`.
        """
        branch = self.branches.get((num_accepted, token))
        if branch is not None and branch.fed:
            window = cut_window(branch.published(order.limit), order)
            self.adopt(head, num_accepted, token, window)
            return window, "late"
        self.adopt(head, num_accepted, token, NO_TOKENS)
        return self.fresh(order, hidden), "fresh"

    def first_scratch_slot(self) -> int:
        """The first cache slot after the chain and all branches."""
        used = [branch.slots[-1] + 1 for branch in self.branches.values() if branch.slots]
        return max([self.chain.num_known, *used])

    def grow(self, due: Sequence[Offer], scratch: int, gamma: int, max_rows: int, lead_to: int) -> list[Branch]:
        """One round: feed the chain up to `lead_to`, and the worthiest of the branches' guesses.

        Args:
            due: branches to grow, and what feeding each of their guesses is worth.
            scratch: first free cache slot.
            gamma: most tokens after a root.
            max_rows: most rows of this round.
            lead_to: position before which all chain tokens are to be fed; no branch starts after it.

        Returns:
            The branches that grew; empty if not even the first one fits.
        """
        if not due:
            return []
        label = "fresh" if due[0].branch.root.source == "fresh" else "expand"
        num_lead = max(0, lead_to - self.chain.num_fed)
        first_tip = num_lead if label == "fresh" else 0
        room = min(max_rows, self.session.capacity - scratch + num_lead, self.session.max_tips + first_tip) - num_lead
        shares = share_out([offer.worths[: 1 + gamma - len(offer.branch.fed)] for offer in due], max(room, 0))
        blocks = [self.chain.block(lead_to)] if num_lead else []
        placed: list[Branch] = []
        for (branch, _), share in zip(due, shares, strict=True):
            if share:
                branch.guesses = branch.guesses[:share]
                blocks.append(self._block(branch, num_lead))
                placed.append(branch)
        num_rows = num_lead + sum(shares)
        if placed:
            started = self.now()
            with self._ledger.time("draft", label):
                tips = self.chain.run(blocks, range(first_tip, num_rows))
                self._absorb(placed, self._note_lead(tips, num_lead - first_tip), num_lead, scratch)
            self.clock.observe(num_rows, self.now() - started)
        return placed

    def read_on(self, stop: int) -> None:
        """Feed the chain up to position `stop` in one round, and note what may come after each of its tokens."""
        chain = self.chain
        stop = min(stop, chain.num_fed + self._max_rows)
        if stop <= chain.num_fed:
            return
        num_rows, started = stop - chain.num_fed, self.now()
        with self._ledger.time("draft", "expand"):
            self._note_lead(chain.run([chain.block(stop)], range(num_rows)), num_rows)
            chain.keep(stop)
        self.clock.observe(num_rows, self.now() - started)

    def _note_lead(self, tips: TipGuesses, num_noted: int) -> TipGuesses:
        """Take what came after the chain's tokens as its candidates; what is left is the branches'."""
        tips = TipGuesses(tips.ids.copy(), tips.logprobs.copy())
        self.chain.note_candidates(self.chain.num_fed, tips.ids[:num_noted, 0], tips.logprobs[:num_noted, 0])
        return TipGuesses(tips.ids[num_noted:], tips.logprobs[num_noted:])

    def _block(self, branch: Branch, num_lead: int) -> RowBlock:
        """Rows for the branch's guesses: they see the chain before its start, and the branch's own cache slots."""
        num_fed = self.chain.num_fed
        return RowBlock(
            tokens=branch.guesses,
            first_position=branch.start + len(branch.fed),
            chain_visible=min(branch.start, num_fed),
            extra_slots=branch.slots,
            lead_rows=min(max(0, branch.start - num_fed), num_lead),
            feature=None if branch.fed else branch.feature,
        )

    def _absorb(self, placed: Sequence[Branch], tips: TipGuesses, num_lead: int, scratch: int) -> None:
        """Take in what a round predicted; cache the rows of the chain tokens it led with, and of confirmed guesses."""
        chain = self.chain
        rows, slots = [*range(num_lead)], [*range(chain.num_fed, chain.num_fed + num_lead)]
        predicted, shares = self._predict(tips, placed)
        first_tip = 0
        for branch in placed:
            last_tip = first_tip + len(branch.guesses)
            own = TipGuesses(tips.ids[first_tip:last_tip], tips.logprobs[first_tip:last_tip])
            kept = branch.absorb(predicted[first_tip:last_tip], shares[first_tip:last_tip], own)
            self.confirmations.observe(len(own.ids), kept)
            new_slots = range(scratch, scratch + kept)
            rows += range(num_lead + first_tip, num_lead + first_tip + kept)
            slots += new_slots
            branch.slots += new_slots
            first_tip = last_tip
            scratch += kept
        self.session.keep_rows(rows, slots)
        chain.num_fed += num_lead

    def _predict(self, tips: TipGuesses, placed: Sequence[Branch]) -> tuple[list[list[int]], list[list[Share]]]:
        """Predicted tokens `[R, 1 + s]` of all tips, those of the branches' guesses one after another, and shares."""
        assert self._chooser is not None
        num_tips, num_ahead, num_candidates = tips.ids.shape
        if not self._chooser.keeps_order:
            starts = [(branch.start + len(branch.fed), len(branch.guesses)) for branch in placed]
            tip_positions = np.concatenate([np.arange(start, start + size) for start, size in starts])
            positions = tip_positions[:, None] + 1 + np.arange(num_ahead)[None, :]
            scores = self._chooser.rank(tips.ids, tips.logprobs, positions).reshape(-1, num_candidates)
            every, best = np.arange(len(scores)), scores.argmax(axis=1)
            predicted = tips.ids.reshape(-1, num_candidates)[every, best].reshape(num_tips, num_ahead)
            behind = np.subtract(scores, scores[every, best][:, None], dtype=np.float64)
            total = np.log(np.exp(behind).sum(axis=1))
            behind[every, best] = _LEAST_SHARE
            others = behind
        else:  # candidates come best first, and nothing changes their order
            predicted = tips.ids[..., 0]
            behind = np.subtract(tips.logprobs, tips.logprobs[..., :1], dtype=np.float64)
            total = np.log(np.exp(behind).sum(axis=2))
            others = behind[..., 1:]
        shares: NDArray[np.float64] = np.empty((num_tips, num_ahead, 2))
        shares[..., 0] = -total.reshape(num_tips, num_ahead)
        other = others.max(axis=-1, initial=_LEAST_SHARE).reshape(num_tips, num_ahead)
        np.add(other, shares[..., 0], out=shares[..., 1])
        return predicted.tolist(), shares.tolist()

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


def cut_window(found: BranchWindow, order: WindowOrder) -> NDArray[np.int64]:
    """As much of a window as was ordered."""
    if order.length is None:
        return found.tokens[: order.limit]
    return found.tokens[: order.length.cut(found.shares, found.num_main, order.limit)]
