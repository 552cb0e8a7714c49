"""The draft's side of the pipeline: windows after the chain, branches beside it, and the cache moves between them.

Owned by the draft worker: no method may be called from two threads.
"""

from collections.abc import Sequence
from math import exp, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.runtime.backends.protocol import DraftSession
from mirrorsd.runtime.draft.tree import LEAST_SHARE, NO_TOKENS, Branch, BranchWindow, DraftChain, RepeatedText
from mirrorsd.runtime.ledger import Ledger, RoundClock
from mirrorsd.runtime.policy.roots import Root
from mirrorsd.runtime.policy.windows import Confirmations, Share, WindowLength, WindowOrder, share_out
from mirrorsd.runtime.sampling.chooser import TokenChooser


class Offer(NamedTuple):
    """A branch that may grow, and what feeding each of its guesses is worth: never more than the guess before it."""

    branch: Branch
    worths: Sequence[float]


class Drafter:
    """Keeps the draft in step with the committed text; grows windows and branches.

    Attributes:
        found: what the last window was cut from; None before the first.
    """

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.chain = DraftChain(session)
        self.clock = RoundClock(session.round_sizes)
        self.confirmations = Confirmations(session.shape.num_streams)
        self.branches: dict[tuple[int, int], Branch] = {}
        self._max_rows = max(session.round_sizes)
        self._chooser: TokenChooser | None = None
        self._repeats: RepeatedText | None = None
        self._disputes: dict[int, tuple[int, float]] = {}
        self._ledger = Ledger()
        self.found: BranchWindow | None = None

    def prefill(
        self, tokens: NDArray[np.int64], chooser: TokenChooser, ledger: Ledger, repeats: RepeatedText | None = None
    ) -> None:
        """Start a request: keep the longest common prefix of the cache, feed the rest but the head token.

        What is few enough to go with the first round is left to it. Guesses lean on `repeats`, if there are any.
        """
        self._chooser, self._ledger, self._repeats, self._disputes = chooser, ledger, repeats, {}
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

    def fresh(self, order: WindowOrder) -> NDArray[np.int64]:
        """Continue the chain from its head token."""
        chain, head = self.chain, self.chain.head
        limit = min(order.limit, self.session.capacity - chain.num_known)
        if head - chain.num_fed >= self._max_rows:
            chain.feed(head)
        branch = Branch(Root(0, chain.token(head), 1.0, "fresh"), head)
        for number in range(order.passes):
            if branch.num_window >= limit or (number and not self._is_worthwhile(branch, number, order.length)):
                break
            whole = Offer(branch, [1.0] * len(branch.guesses))
            if not self.grow([whole], head + len(branch.fed), limit, self._max_rows, head):
                break
        self.found = branch.published(limit)
        window = cut_window(self.found, order)
        self._extend_chain(branch, window)
        return window

    def _is_worthwhile(self, branch: Branch, passes: int, length: WindowLength | None) -> bool:
        seconds = self.clock.shortest_seconds
        return length is None or length.is_pass_worthwhile(branch.shares, len(branch.fed), passes, seconds)

    def adopt(
        self, head: int, num_accepted: int, token: int, window: NDArray[np.int64], behind: Sequence[int] = ()
    ) -> None:
        """Make the verified text and the next window the chain; move the branch's cache rows to their positions.

        The text goes on with `token` where it left the old window, then with `behind`, whose last is the new head.

        Window tokens `1 .. num_accepted` stay where they are; the rest of the old window is forgotten by number. If
        the root `(num_accepted, token)` has a branch, its fed rows that agree with `window` become chain rows.

        With the head at position 10 and two tokens accepted, the new head stands at 13. A branch with fed tokens
        `[token, 4, 5]` in slots 17, 20, 21 and `window = [4, 6]` keeps two rows: slots 17, 20 move to 13, 14.
        """
        branch = self.branches.get((num_accepted, token))
        self.branches = {}
        self.chain.cut(head + num_accepted + 1)
        self.chain.append([token])
        self._settle()
        if len(behind):
            window = np.concatenate((np.array(behind, dtype=np.int64), window))
        if branch is not None and branch.fed:
            self._extend_chain(branch, window)
        else:
            self.chain.append(window)

    def _settle(self) -> None:
        """Where the draft and the text's repeats disagreed about a token that is known by now: who was right."""
        for position, (token, chance) in self._disputes.items():
            if position < self.chain.num_known:
                assert self._repeats is not None  # nobody else disputes
                self._repeats.settle(chance, is_right=self.chain.token(position) == token)
        self._disputes = {}

    def resolve(
        self, head: int, num_accepted: int, token: int, order: WindowOrder, behind: Sequence[int] = ()
    ) -> tuple[NDArray[np.int64], str]:
        """The next window when the scheduler found none: a branch that finished late, or a fresh one; see `adopt`.

        Returns:
            The window and its source: `late` or `fresh`.
        """
        branch = self.branches.get((num_accepted, token))
        found = None
        if branch is not None and branch.fed:
            found = branch.published(order.limit + len(behind)).after(behind)
        if found is not None:
            self.found, window = found, cut_window(found, order)
            self.adopt(head, num_accepted, token, window, behind)
            return window, "late"
        self.adopt(head, num_accepted, token, NO_TOKENS, behind)
        return self.fresh(order), "fresh"

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
                tips = self._with_repeats(
                    tips, range(self.chain.num_fed + first_tip, self.chain.num_fed + num_lead), placed
                )
                self._absorb(placed, self._note_lead(tips, num_lead - first_tip), num_lead, scratch)
            self.clock.observe(num_rows, self.now() - started)
        return placed

    def lead(self, stop: int) -> bool:
        """One round for the chain alone: what the draft thinks comes after its tokens before `stop` is known then.

        What the text has said before plays no part. A window that is not the draft's may be a repeat, taken where one
        seemed likely: what becomes of it says nothing of repeats elsewhere.

        Returns:
            Whether there was anything to feed, and no more than one round takes.
        """
        chain = self.chain
        first, stop = chain.num_fed, min(stop, self.session.capacity)
        if not 0 < stop - first <= min(self._max_rows, self.session.max_tips):
            return False
        started = self.now()
        with self._ledger.time("draft", "expand"):
            tips = chain.run([chain.block(stop)], range(stop - first))
            self._note_lead(tips, stop - first)
            chain.keep(stop)
        self.clock.observe(stop - first, self.now() - started)
        return True

    def _note_lead(self, tips: TipGuesses, num_noted: int) -> TipGuesses:
        """Take what came after the chain's tokens as its candidates; what is left is the branches'."""
        self.chain.note_candidates(self.chain.num_fed, tips.ids[:num_noted, 0], tips.logprobs[:num_noted, 0])
        return TipGuesses(tips.ids[num_noted:], tips.logprobs[num_noted:])

    def _with_repeats(self, tips: TipGuesses, lead: range, placed: Sequence[Branch]) -> TipGuesses:
        """A copy in which the tips' next tokens know what the text has said before.

        The tips are the chain's tokens at the positions `lead`, then the branches' guesses.
        """
        tips = TipGuesses(tips.ids.copy(), tips.logprobs.copy())
        if self._repeats is not None:
            self._disputes |= self._lean(
                self._repeats,
                self.chain.end(lead.start),
                [self.chain.token(position) for position in lead],
                tips,
                lead.start,
            )
            first = len(lead)
            for branch in placed:
                own = TipGuesses(tips.ids[first:], tips.logprobs[first:])
                start = branch.start + len(branch.fed)
                branch.disputes |= self._lean(self._repeats, self._text_of(branch), branch.guesses, own, start)
                first += len(branch.guesses)
        return tips

    @staticmethod
    def _lean(
        repeats: RepeatedText, text: list[int], tokens: Sequence[int], tips: TipGuesses, first: int
    ) -> dict[int, tuple[int, float]]:
        """Let what comes after each of `tokens`, which follow `text` from position `first` on, lean on it; in place.

        Returns:
            By position: what was said where the draft thinks otherwise, and the chance of that.
        """
        repeat, disputes = repeats.find(text), {}
        for place, token in enumerate(tokens):
            text.append(token)
            repeat = repeats.go_on(repeat, text)
            said = repeats.said(repeat)
            if said is not None and tips.ids[place, 0, 0] != said[0]:
                disputes[first + place + 1] = said
                mix(tips.ids[place, 0], tips.logprobs[place, 0], said[0], repeats.share(said[1]))
        return disputes

    def _text_of(self, branch: Branch) -> list[int]:
        """The text's end before a branch's guesses."""
        return [*self.chain.end(branch.start), *branch.fed]

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
        starts = [branch.start + len(branch.fed) for branch in placed]
        firsts = [np.arange(start, start + len(branch.guesses)) for start, branch in zip(starts, placed, strict=True)]
        positions = np.concatenate(firsts)[:, None] + 1 + np.arange(tips.ids.shape[1])
        predicted, shares = self._choose(tips.ids, tips.logprobs, positions)
        first_tip = 0
        for branch in placed:
            own = slice(first_tip, first_tip + len(branch.guesses))
            of_branch = TipGuesses(tips.ids[own], tips.logprobs[own])
            if self._repeats is not None:
                self._go_on(self._repeats, branch, of_branch, (predicted[own], shares[own]))
            kept = branch.absorb(predicted[own].tolist(), shares[own].tolist(), of_branch)
            self.confirmations.observe(len(of_branch.ids), kept)
            new_slots = range(scratch, scratch + kept)
            rows += range(num_lead + first_tip, num_lead + first_tip + kept)
            slots += new_slots
            branch.slots += new_slots
            first_tip = own.stop
            scratch += kept
        self.session.keep_rows(rows, slots)
        chain.num_fed += num_lead

    def _choose(
        self, ids: NDArray[np.int64], logprobs: NDArray[np.float32], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The best of candidates `[..., m]` for each of `positions [...]`, and how sure it is, `[..., 2]`."""
        assert self._chooser is not None
        ranked = logprobs if self._chooser.keeps_order else self._chooser.rank(ids, logprobs, positions)
        scores = ranked.reshape(-1, ids.shape[-1])
        every, best = np.arange(len(scores)), scores.argmax(axis=1)
        behind = np.subtract(scores, scores[every, best][:, None], dtype=np.float64)
        total = np.log(np.exp(behind).sum(axis=1))
        behind[every, best] = LEAST_SHARE
        shares = np.empty((len(scores), 2))
        shares[:, 0], shares[:, 1] = -total, behind.max(axis=1) - total
        return ids.reshape(-1, ids.shape[-1])[every, best].reshape(positions.shape), shares.reshape(*positions.shape, 2)

    def _choose_one(self, ids: NDArray[np.int64], logprobs: NDArray[np.float32], position: int) -> tuple[int, Share]:
        """As `_choose` for one list of candidates `[m]`. Plain floats: a dozen are too few for arrays to be fast."""
        assert self._chooser is not None
        ranked = logprobs if self._chooser.keeps_order else self._chooser.rank(ids, logprobs, np.array(position))
        scores = ranked.tolist()
        highest = max(scores)
        best = scores.index(highest)
        total = log(sum([exp(score - highest) for score in scores]))
        scores[best] = LEAST_SHARE + highest
        return int(ids[best]), (-total, max(scores) - highest - total)

    def _go_on(
        self,
        repeats: RepeatedText,
        branch: Branch,
        tips: TipGuesses,
        chosen: tuple[NDArray[np.int64], NDArray[np.float64]],
    ) -> None:
        """Let streams after the last confirmed guess follow what the text has said; in place."""
        (predicted, shares), last = chosen, branch.num_confirmed(chosen[0].tolist()) - 1
        text = [*self._text_of(branch), *branch.guesses[: last + 1], int(predicted[last, 0])]
        repeat, position = repeats.find(text), branch.start + len(branch.fed) + last + 1
        for ahead in range(1, tips.ids.shape[1]):
            ids, logprobs = tips.ids[last, ahead], tips.logprobs[last, ahead]
            said = repeats.said(repeat)
            if said is not None and ids[0] != said[0]:
                mix(ids, logprobs, said[0], repeats.share(said[1]))
                predicted[last, ahead], shares[last, ahead] = self._choose_one(ids, logprobs, position + ahead)
            text.append(int(predicted[last, ahead]))
            repeat = repeats.go_on(repeat, text)

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
        self._disputes |= branch.disputes_after(num_kept)
        self.chain.append(window)
        num_noted = min(len(branch.candidate_ids), len(window) + 1)
        if num_noted:
            ids, logprobs = branch.candidate_ids[:num_noted], branch.candidate_logprobs[:num_noted]
            self.chain.note_candidates(branch.start, ids, logprobs)


def cut_window(found: BranchWindow, order: WindowOrder) -> NDArray[np.int64]:
    """As much of a window as was ordered."""
    length, limit = order.length, order.limit
    return found.tokens[: limit if length is None else length.cut(found.shares, found.num_main, limit)]


def mix(ids: NDArray[np.int64], logprobs: NDArray[np.float32], token: int, share: float) -> None:
    """Give a token that the text has said its share besides what the draft thinks of it, in place.

    Candidates `[m]` stay in order.

    >>> ids, logprobs = np.array([4, 9]), np.log(np.array([0.6, 0.4], dtype=np.float32))
    >>> mix(ids, logprobs, 7, 0.4); ids.tolist(), [round(float(share), 2) for share in np.exp(logprobs)]
    ([7, 4], [0.4, 0.36])
    """
    known, others = ids.tolist(), (logprobs + log(1 - share)).tolist()
    logprob = log(share) if share > 0 else -inf
    if token in known:
        place = known.index(token)
        logprob = log(share + exp(others[place]))
    elif logprob <= others[-1]:  # all candidates are likelier
        logprobs[:] = others
        return
    else:
        place = len(known) - 1
    del known[place], others[place]
    while place and others[place - 1] < logprob:
        place -= 1
    known.insert(place, token)
    others.insert(place, logprob)
    ids[:], logprobs[:] = known, others
