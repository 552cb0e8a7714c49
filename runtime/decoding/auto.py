"""`auto`: takes every window from where it is worth most, be it the draft, the text itself or nowhere."""

from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.lookup import FreeRows, Repeats
from mirrorsd.runtime.decoding.mirror import MirrorSource
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.decoding.step import Acceptance, Beside, Found, InFlight, ReadPrompt, SerialSource, WindowSource
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.policy.account import Account, PairKnowledge


class Verified(NamedTuple):
    """What was in flight, and what became of it."""

    inflight: InFlight
    acceptance: Acceptance


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
        free_rows: FreeRows,
        known: PairKnowledge,
    ) -> None:
        """Draft with `drafting`, which is `serial` or falls back to it."""
        self.name = "plain"
        self._request, self._draft = serial.request, serial.draft
        self._serial, self._drafting, self._repeats, self._free_rows = serial, drafting, repeats, free_rows
        self._known, self._account = known, Account(known)
        self._is_in_step = self._is_plain = self._is_trial = self._is_unjudged = False
        self._drafted_s = 0.0
        self._free_guess: NDArray[np.int64] = NO_TOKENS
        self._num_drafted_for = 0

    @property
    def _num_missing(self) -> int:
        """How many tokens of the text the draft has not read."""
        return 0 if self._is_in_step else self._request.num_tokens - self._num_drafted_for

    @property
    def _fresh_seconds(self) -> float:
        """What the rounds of a window take, by the draft's own clock; 0 until measured."""
        return self._request.speculation.passes * self._draft.round_seconds

    @property
    def _speed(self) -> float:
        windows = self._request.windows
        return windows.speed if windows is not None else self._known.plain_speed

    @property
    def _is_overlapping(self) -> bool:
        return self._drafting is not self._serial

    def start(self, read_prompt: ReadPrompt) -> NDArray[np.int64]:
        """Both devices read the prompt at once; a first window only where drafting is expected to pay."""
        if self._draft.is_ready() and not self._draft.takes_turns:
            self._serial.post_prefill()
            self._is_in_step = True
        read_prompt()
        window = self._choose(None).window
        if self._drafted_s:  # before the first step
            self._account.observe_step(0.0, self._drafted_s, 0, is_plain=False)
        return window

    def begin(self, inflight: InFlight) -> Beside | None:
        may_prepare = self._is_in_step and self._known.is_plain_known and not self._account.is_resting
        beside = self._drafting.begin(inflight) if may_prepare else None
        self.name = "plain" if self._is_plain and beside is None else self._drafting.name
        return beside

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The worthiest window."""
        if self._is_unjudged:  # nobody could say what the window was worth: now it shows
            self._account.observe_window(float(acceptance.num_accepted), self._speed, is_trial=self._is_trial)
        self._account.verified(acceptance.num_accepted)
        if len(self._free_guess):  # what plain decoding would have brought, had it been its turn
            first = int(inflight.window[0]) if acceptance.num_accepted else acceptance.next_token
            self._known.observe_free_rows(1 + int(self._free_guess[0] == first))
        return self._choose(Verified(inflight, acceptance))

    def _choose(self, done: Verified | None) -> Found:
        account, speed = self._account, self._speed
        self._is_plain, self._is_trial, self._is_unjudged, self._drafted_s = False, False, False, 0.0
        self._free_guess = NO_TOKENS
        if not self._request.window_limit():
            return self._decline(done)
        is_slowing = self._request.num_beside and self._draft.takes_turns  # others' passes would wait for its rounds
        if is_slowing or not self._draft.is_ready() or not self._known.is_plain_known:  # a text can repeat itself still
            return self._repeat(done, 0.0) or self._decline(done)
        forced = self._serial.forced(*done) if done is not None and self._is_in_step else None
        if forced is not None:
            return forced
        is_ready = self._is_in_step and done is not None and self._drafting.is_prepared(done.acceptance)
        worth = account.worth_of_drafting(speed, is_ready=is_ready)
        self._is_trial = not is_ready and worth <= 0 and account.may_try(speed, self._num_missing, self._fresh_seconds)
        repeated = None if self._is_trial else self._repeat(done, max(worth, 0.0))
        if repeated is not None:
            return repeated
        if self._is_trial or ((is_ready or worth > 0) and account.is_covered(speed, is_ready=is_ready)):
            return self._draft_window(done)
        return self._decline(done)

    def _repeat(self, done: Verified | None, least: float) -> Found | None:
        """What the text has said before, where that is worth more than `least` tokens."""
        repeat = self._repeats.offer(least)
        if repeat is None:
            return None
        found = Found(repeat, "text")
        if done is not None and self._is_in_step:
            self._serial.adopt(*done, repeat)
            found = self._serial.allowed(found)
        return found

    def _decline(self, done: Verified | None) -> Found:
        """Plain decoding: no window but what free rows hold."""
        self._is_plain = True
        window = self._free_rows.guess()
        if done is not None and self._is_in_step:
            self._is_in_step = self._is_overlapping and not self._account.is_resting and self._draft.is_working()
            if self._is_in_step:
                self._serial.adopt(*done, window)
        return Found(window)

    def _draft_window(self, done: Verified | None) -> Found:
        ledger, windows, was_in_step = self._request.ledger, self._request.windows, self._is_in_step
        num_missing = self._num_missing
        self._free_guess = self._free_rows.guess()
        if windows is not None:
            windows.budget = self._account.trial_budget if self._is_trial else self._account.credit
        before = ledger.drafted_s
        if was_in_step:
            found = self._drafting.next(*done) if done is not None else Found(self._serial.fresh_window(), "fresh")
        else:
            found = Found(self._serial.draft_window(), "fresh")
        self._drafted_s = ledger.drafted_s - before
        self._is_in_step = self._draft.has_text
        if self._drafted_s:
            self._known.observe_drafting(self._drafted_s, num_missing)
        self._num_drafted_for = self._request.num_tokens
        if windows is not None:
            self._account.observe_window(windows.worth, self._speed, is_trial=self._is_trial)
        self._is_unjudged = windows is None
        self._is_plain = not len(found.window)
        return found

    def observe(self, step: StepRecord) -> None:
        """Learn from the step."""
        if self._draft.is_preparing:  # a step beside a compiler teaches nothing
            return
        if self._request.num_beside:  # one beside others teaches nothing of plain decoding alone
            self._serial.observe(step)
            return
        is_plain, seconds = step.method == "plain", step.own_seconds - self._drafted_s
        now = self._plain_seconds_now(step)
        self._account.observe_step(
            seconds, self._drafted_s, 1 + step.num_accepted, is_plain=is_plain, plain_seconds=now
        )
        self._serial.observe(step)
        windows = self._request.windows
        if windows is not None and self._known.is_plain_known:
            windows.slowdown = self._known.plain_seconds / windows.pass_seconds(1)

    def _plain_seconds_now(self, step: StepRecord) -> float:
        """By the step's own pass, beside which nothing ran in serial decoding; 0 where that cannot be said."""
        windows = self._request.windows
        if windows is None or step.method != "serial":
            return 0.0
        spans = takewhile(lambda span: span.start >= step.started, reversed(self._request.ledger.spans))
        pass_seconds = sum(span.seconds for span in spans if span.is_of_pass)
        return self._known.observe_pass(pass_seconds / windows.pass_seconds(1 + step.num_window))

    def close(self) -> None:
        """Leave nothing running."""
        self._drafting.close()
