"""`auto`: takes every window from where it is worth most, be it the draft, a head, the text itself or nowhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.head import HeadArm, Together, Verified
from mirrorsd.runtime.decoding.links import DraftLink
from mirrorsd.runtime.decoding.lookup import Repeats
from mirrorsd.runtime.decoding.mirror import MirrorSource
from mirrorsd.runtime.decoding.protocol import Beside, Found, InFlight, ReadPrompt, WindowSource
from mirrorsd.runtime.decoding.request import Acceptance, Request, StepRecord
from mirrorsd.runtime.decoding.step import Asleep, SerialSource
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.policy.account import Account, PairKnowledge


@dataclass(slots=True)
class _Choice:
    """The window that was chosen last, and what it has cost.

    Attributes:
        head: whose it is, if a head's.
        is_plain: whether it is plain decoding's.
        is_trial: whether it did not seem to pay.
        is_unjudged: whether nobody could say what it is worth.
        is_repeat: whether the text has said it before.
        is_light: whether neither draft nor head was asked for it.
        looked_at: when somebody began to look for it.
        drafted_s, read_s: seconds that the target waited for it, and those of them for reading the text.
        free_guess: what plain decoding would have guessed.
    """

    head: HeadArm | None = None
    is_plain: bool = False
    is_trial: bool = False
    is_unjudged: bool = False
    is_repeat: bool = False
    is_light: bool = False
    looked_at: float = 0.0
    drafted_s: float = 0.0
    read_s: float = 0.0
    free_guess: NDArray[np.int64] = field(default_factory=lambda: NO_TOKENS)


class _Begun(NamedTuple):
    """The step under way: whether nothing works beside its pass, whether its window is a repeat, and what head's.

    It `is_light` as its window is.
    """

    is_alone: bool = False
    is_repeat: bool = False
    is_light: bool = False
    head: HeadArm | None = None


class AutoSource(WindowSource):
    """Takes every window from where it is worth most.

    Attributes:
        name: the method of the step under way.
    """

    def __init__(
        self,
        serial: SerialSource,
        drafting: SerialSource | MirrorSource,
        repeats: Repeats,
        known: PairKnowledge,
        heads: Sequence[HeadArm] = (),
    ) -> None:
        """Draft with `drafting`, which is `serial` or falls back to it, or have `heads` guess."""
        self.name = "plain"
        self._serial, self._drafting, self._repeats = serial, drafting, repeats
        self._known, self._account, self._heads = known, Account(known), heads
        self._is_in_step = False
        self._num_read: int | None = None
        self._choice, self._begun = _Choice(), _Begun()
        self._unsettled: list[StepRecord] = []

    @property
    def _request(self) -> Request:
        return self._serial.request

    @property
    def _draft(self) -> DraftLink:
        return self._serial.draft

    @property
    def _num_missing(self) -> int:
        """How many tokens of the text the draft has not read: more with every token, until it works for the text."""
        if self._is_in_step:
            return 0
        last = self._request.num_tokens - 1
        if self._num_read is None:
            num_read = last - self._draft.num_unread(self._request.tokens)
            self._num_read = num_read if num_read < last else None
            return last - num_read
        return last - self._num_read

    @property
    def _fresh_seconds(self) -> float:
        """What the rounds of a window take, by the draft's own clock; 0 until measured."""
        return self._request.speculation.passes * self._draft.round_seconds

    @property
    def _speed(self) -> float:
        windows = self._request.windows
        return windows.speed if windows is not None else self._known.plain_speed

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """Both devices read the prompt at once; a first window only where drafting is expected to pay."""
        if not self._draft.takes_turns and self._draft.is_ready():
            self._serial.post_prefill()
            self._is_in_step = True
        readers = self._readers()
        read_prompt(Together(readers) if readers else None)
        is_asleep = self._known.attention.left > 0 and not (readers or self._is_in_step)
        window = (self._decline(None) if is_asleep else self._choose(None)).window
        if self._choice.drafted_s:  # before the first step
            self._account.observe_step(0.0, self._choice.drafted_s - self._choice.read_s, 0, is_plain=False)
        return window

    def begin(self, inflight: InFlight) -> Beside | None:
        may_prepare = self._is_in_step and self._known.is_plain_known and not self._account.is_resting
        beside = self._drafting.begin(inflight) if may_prepare else None
        choice = self._choice
        head = None if choice.is_plain else choice.head
        if not (choice.is_plain or choice.is_repeat):
            (self._serial if head is None else head.source).begin(inflight)
        self._begun = _Begun(beside is None, choice.is_repeat, choice.is_light, head)
        finder = self._drafting if head is None else head.source
        self.name = "plain" if choice.is_plain and beside is None else finder.name
        return beside

    def _readers(self) -> list[HeadArm]:
        """Heads that read the prompt along: the best that pays, and one that was not tried for long.

        A head for which rows would have to be computed again that are cached stays out of the text.
        """
        if self._request.joint.num_beside:
            return []
        speed = self._speed
        usable = [head for head in self._heads if head.is_working and head.may_read(self._request)]
        paying = [head for head in usable if self._worth_of(head, speed) > 0]
        found = sorted(paying, key=lambda head: -self._worth_of(head, speed))[:1]
        due = [head for head in usable if head not in found and self._may_try(head, speed)]
        return found + sorted(due, key=lambda head: -head.known.since)[:1]

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The worthiest window, where one is looked for."""
        if self._known.attention.left > 0 and self._choice.is_plain and not self._is_in_step:
            self._repeats.watch(is_wanted=False)
            asleep = Asleep(self._repeats.free_rows, self, self._known.attention.left, self.wake)
            return Found(asleep.guess(), then=asleep)
        if self._choice.is_light and self._is_quiet():
            return self._look()
        self._settle()
        if self._choice.is_unjudged:  # nobody could say what the window was worth: now it shows
            self._account.observe_window(float(acceptance.num_right), self._speed, is_trial=self._choice.is_trial)
        self._account.verified(acceptance.num_right)
        if self._choice.head is not None:
            self._choice.head.verified(inflight, acceptance, self._speed, self._choice.drafted_s)
        if len(self._choice.free_guess):  # what plain decoding would have brought, had it been its turn
            first = int(inflight.window[0]) if acceptance.num_accepted else acceptance.rest[0]
            self._known.observe_free_rows(1 + int(self._choice.free_guess[0] == first))
        return self._choose(Verified(inflight, acceptance))

    def wake(self, num_slept: int, num_left: int = 0) -> None:
        """So many tokens were written for which nobody looked; a text may have ended so many before the time."""
        self._known.attention.left = num_left
        self._repeats.watch(is_wanted=not num_left)
        self._account.count(num_slept)
        for head in self._heads:
            head.known.since += num_slept

    def _choose(self, done: Verified | None) -> Found:
        account, num_tokens = self._account, self._request.num_tokens
        self._choice = _Choice(looked_at=self._request.ledger.now())
        if not self._request.window_limit():
            return self._decline(done)
        if self._is_quiet():
            return self._look()
        speed = self._speed
        is_alone = not self._request.joint.num_beside  # else others' passes wait for a draft on their cores
        is_slowing = self._draft.takes_turns and not (is_alone or self._draft.drafter.session.shares_rounds)
        can_draft = not is_slowing and self._draft.is_working()
        if not self._known.is_plain_known or not (can_draft or self._heads):  # a text can repeat itself still
            self._read_along(done)
            return self._repeat(done, 0.0) or self._decline(done)
        forced = self._serial.forced(*done) if done is not None and self._is_in_step else None
        if forced is not None:
            return forced
        is_ready = self._is_in_step and done is not None and self._drafting.is_prepared(done.acceptance)
        worth = account.worth_of_drafting(speed, is_ready=is_ready) if can_draft else 0.0
        if worth > 0 and not is_ready and not account.may_join(speed, self._num_missing):
            can_draft, worth = False, 0.0
        may_try = can_draft and not is_ready and worth <= 0 and account.is_trial_due
        self._choice.is_trial = may_try and account.may_try(speed, self._num_missing, self._fresh_seconds)
        if (self._choice.is_trial or worth > 0) and not self._draft.is_ready():  # its compiler would slow the text
            can_draft, worth, self._choice.is_trial = False, 0.0, False
        if not self._choice.is_trial and (head := self._best_head(done, max(worth, 0.0), speed)) is not None:
            return self._head_window(done, head, speed)
        if not self._choice.is_trial and worth <= 0:  # neither draft nor head pays, nor will they at once
            account.be_quiet(num_tokens, until_tried=can_draft)
        repeated = None if self._choice.is_trial else self._repeat(done, max(worth, 0.0))
        if repeated is not None:
            return repeated
        if self._choice.is_trial or (
            can_draft and (is_ready or worth > 0) and account.is_covered(speed, is_ready=is_ready)
        ):
            return self._draft_window(done)
        return self._decline(done)

    def _is_quiet(self) -> bool:
        """Whether neither draft nor head is looked at: that would change nothing yet."""
        request = self._serial.request
        return not (self._is_in_step or request.joint.num_beside) and self._account.is_quiet(request.num_tokens)

    def _look(self) -> Found:
        """What the text has said before, or nothing, and no other thought about it."""
        self._choice = choice = _Choice(is_light=True, looked_at=self._serial.request.ledger.now())
        repeat = self._repeats.offer(0.0)
        choice.is_plain, choice.is_repeat = repeat is None, repeat is not None
        return Found(self._repeats.free_rows.guess()) if repeat is None else Found(repeat, "text")

    def _settle(self) -> None:
        """Learn from the light steps lately."""
        account, num_tokens = self._account, 0
        for step in self._unsettled:
            num_tokens += 1 + step.num_accepted
            if step.method == "plain":
                account.observe_step(step.own_seconds, 0.0, 1 + step.num_accepted, is_plain=True)
            else:
                account.count(1 + step.num_accepted)
        for head in self._heads:
            head.known.since += num_tokens
        self._unsettled.clear()

    def _best_head(self, done: Verified | None, least: float, speed: float) -> HeadArm | None:
        """The head whose window is worth most, and more than `least` tokens; else one that may be tried instead."""
        if self._request.joint.num_beside:  # others' passes would wait for it
            return None
        best, place = None, None if done is None else done.inflight.head
        for head in self._heads:
            if head.follows(place) and (worth := self._worth_of(head, speed)) > least:
                best, least = head, worth
        if best is not None:
            return best
        tried = next((head for head in self._heads if head.follows(place) and self._may_try(head, speed)), None)
        self._choice.is_trial = tried is not None
        return tried

    def _may_try(self, head: HeadArm, speed: float) -> bool:
        return self._account.may_try_head(head.known, speed, head.lost)

    def _worth_of(self, head: HeadArm, speed: float) -> float:
        return self._account.worth_of_head(head.known, speed, head.lost)

    def _read_along(self, done: Verified | None) -> None:
        """Heads that have read the prompt go on reading until plain decoding is known."""
        if done is None:
            return
        before = self._request.ledger.drafted_s
        for head in self._heads:
            if head.follows(done.inflight.head):
                head.source.next(*done)
        self._choice.drafted_s = self._request.ledger.drafted_s - before

    def _head_window(self, done: Verified | None, head: HeadArm, speed: float) -> Found:
        """The head's window, or a repeat of the text that is worth more; the head has read along then."""
        ledger, is_trial = self._request.ledger, self._choice.is_trial
        before = ledger.drafted_s
        found = head.window(done, speed, is_trial=is_trial)
        self._choice.drafted_s = ledger.drafted_s - before
        repeated = None if is_trial else self._repeat(done, max(self._worth_of(head, speed), 0.0))
        if repeated is not None:
            return repeated
        self._choice.head, self._choice.free_guess = head, self._repeats.free_rows.guess()
        self._choice.is_plain = not len(found.window)
        self._keep_in_step(done, found.window)
        return found

    def _repeat(self, done: Verified | None, least: float) -> Found | None:
        """What the text has said before, where that is worth more than `least` tokens."""
        repeat = self._repeats.offer(least)
        if repeat is None:
            return None
        found, self._choice.is_repeat = Found(repeat, "text"), True
        if self._is_in_step and done is None:
            self._serial.begin_with(repeat)
        elif self._is_in_step and done is not None:
            self._serial.adopt(*done, repeat)
            found = self._serial.allowed(found)
        return found

    def _decline(self, done: Verified | None) -> Found:
        """Plain decoding: no window but what free rows hold."""
        self._choice.is_plain, window = True, self._repeats.free_rows.guess()
        self._keep_in_step(done, window)
        return Found(window)

    def _keep_in_step(self, done: Verified | None, window: NDArray[np.int64]) -> None:
        """A window that is not the draft's: where it works beside the target, it hears of it."""
        if self._is_in_step and done is None:
            self._serial.begin_with(window)
        elif self._is_in_step and done is not None:
            is_overlapping = self._drafting is not self._serial
            self._is_in_step = is_overlapping and not self._account.is_resting and self._draft.is_working()
            if self._is_in_step:
                self._serial.adopt(*done, window)

    def _draft_window(self, done: Verified | None) -> Found:
        ledger, windows, was_in_step = self._request.ledger, self._request.windows, self._is_in_step
        num_missing = self._num_missing
        self._choice.free_guess = self._repeats.free_rows.guess()
        if windows is not None:
            # A trial has paid as soon as it gets one token right.
            windows.budget = min(self._account.credit, 1.0 if self._choice.is_trial else inf)
        before = ledger.drafted_s
        if was_in_step:
            found = self._drafting.next(*done) if done is not None else Found(self._serial.fresh_window(), "fresh")
        else:
            found = Found(self._serial.draft_window(), "fresh")
        self._choice.drafted_s = ledger.drafted_s - before
        self._is_in_step, self._num_read = self._draft.has_text, None
        if self._choice.drafted_s:
            if num_missing and not self._choice.is_trial:
                most = self._choice.drafted_s - (self._known.draft_seconds or self._fresh_seconds)
                self._choice.read_s = max(min(self._known.reading_seconds(num_missing), most), 0.0)
            self._known.observe_drafting(self._choice.drafted_s, num_missing)
        if windows is not None:
            self._account.observe_window(windows.worth, self._speed, is_trial=self._choice.is_trial)
        self._choice.is_unjudged = windows is None
        self._choice.is_plain = not len(found.window)
        return found

    def observe(self, step: StepRecord) -> None:
        """Learn from the step."""
        choice, known = self._choice, self._known
        if self._draft.is_preparing:  # a step beside a compiler teaches nothing
            return
        num_tokens, is_plain = 1 + step.num_accepted, step.method == "plain"
        if self._begun.is_light and choice.is_light:
            self._serial.observe(step)
            self._unsettled.append(step)
        elif not self._learn(step, num_tokens, is_plain=is_plain):
            return
        gain = 0.0 if is_plain else num_tokens - step.own_seconds * known.plain_speed
        looking = self._serial.request.ledger.now() - choice.looked_at - choice.drafted_s
        known.attention.observe(gain, looking, known.plain_speed)

    def _learn(self, step: StepRecord, num_tokens: int, *, is_plain: bool) -> bool:
        """What it teaches of all sources; False where it was one beside others."""
        choice, known, windows, of_head = self._choice, self._known, self._request.windows, self._begun.head
        for head in self._heads:
            head.known.since += num_tokens
        if of_head is not None and windows is not None:
            of_head.source.observe(step)
            windows.observe(0, step.num_accepted, step.own_seconds)  # it says nothing of the draft's guesses
        else:
            self._serial.observe(step)
        if self._request.joint.num_beside:  # one beside others teaches nothing of plain decoding alone
            self._account.observe_step_beside_others(num_tokens, is_plain=is_plain)
            return False
        seconds, now = step.own_seconds - choice.drafted_s, self._plain_seconds_now(step)
        drafted_s = 0.0 if choice.head is not None else choice.drafted_s - choice.read_s
        if of_head is not None or self._begun.is_repeat:
            self._account.observe_step_of_another(drafted_s, num_tokens)
        else:
            self._account.observe_step(seconds, drafted_s, num_tokens, is_plain=is_plain, plain_seconds=now)
        if windows is not None and known.is_plain_known:
            slowdown = known.plain_seconds / windows.pass_seconds(1)
            for one in (windows, *(head.source.windows for head in self._heads)):
                if one is not None:
                    one.slowdown = slowdown
        return True

    def _plain_seconds_now(self, step: StepRecord) -> float:
        """By the step's own pass, beside which nothing ran in serial decoding; 0 where that cannot be said."""
        windows = self._request.windows
        if windows is None or step.method in ("plain", "mirror") or not self._begun.is_alone:
            return 0.0
        spans = takewhile(lambda span: span.start >= step.started, reversed(self._request.ledger.spans))
        pass_seconds = sum(span.seconds for span in spans if span.is_of_pass)
        return self._known.observe_pass(pass_seconds / windows.pass_seconds(1 + step.num_window + step.num_siblings))

    def close(self) -> None:
        """Leave nothing running, and nothing unlearned."""
        self._settle()
        self._drafting.close()
