"""`auto`: never slower than plain decoding. Runs the fastest method, by what each one's tokens have cost lately.

While it decodes plainly, because speculation does not pay or nothing is known yet, the draft is asked for a window on
the side, now and then and without waiting. Plain decoding goes on and shows how much of it was right: only a window
that would have paid brings speculation back, and then what is left of it is already there. Switching changes no token.
"""

from collections.abc import Callable
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from mirrorsd.runtime.decoding.acceptance import Acceptance
from mirrorsd.runtime.decoding.lookup import FreeRows, RepeatSource
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.decoding.serial import SerialSource
from mirrorsd.runtime.decoding.step import Beside, Found, InFlight
from mirrorsd.runtime.draft.chain import NO_TOKENS, longest_common_prefix
from mirrorsd.runtime.policy.methods import CostBook

_FIRST_PAUSE, _FIRST_HOPELESS_PAUSE, _LONGEST_PAUSE = 4, 16, 256
"""Tokens between two windows on the side, where speculation has paid so far and where it has not; triples with every
window that does not pay, so that hopeless texts cost little."""
_FIRST_ASK = 4
"""After speculation has ended, the first window is asked for in this part of the pause: it may have been bad luck."""
_UNPROVEN_GAMMA = 3
"""Longest window until a text has gained something, where nothing else cuts windows: its first misses cost little."""


class SideWindow:
    """A window that the draft works out while decoding goes on plainly, and how much of it came true."""

    def __init__(self, serial: SerialSource) -> None:
        self._request = serial.request
        self._first = self._request.num_tokens
        self.asked = self._request.ledger.now()
        self._answers: list[NDArray[np.int64]] = []
        serial.post_window(self._answers.append)

    @property
    def is_there(self) -> bool:
        """Whether the draft has answered."""
        return bool(self._answers)

    @property
    def num_right(self) -> int:
        """How many of its tokens have been decoded by now."""
        return longest_common_prefix(self._answers[0], self._decoded)

    @property
    def is_refuted(self) -> bool:
        """Whether another token came than one of its own; nothing more of it can come true."""
        return self.num_right < min(len(self._decoded), len(self._answers[0]))

    @property
    def is_overtaken(self) -> bool:
        """Whether more was decoded than it has: the draft's chain ends before the text does."""
        return len(self._decoded) > len(self._answers[0])

    @property
    def rest(self) -> NDArray[np.int64]:
        """What has not been decoded yet."""
        return self._answers[0][len(self._decoded) :]

    @property
    def _decoded(self) -> NDArray[np.int64]:
        return self._request.tokens[self._first :]


class AutoSource:
    """Takes windows from whichever source is cheapest."""

    def __init__(
        self, serial: SerialSource, sources: dict[str, RepeatSource], free_rows: FreeRows, book: CostBook
    ) -> None:
        """Use `sources` by the names of their methods; `serial` drafts for them, `free_rows` decodes plainly."""
        self.request = serial.request
        self._serial, self._sources, self._free_rows = serial, sources, free_rows
        self._book = book
        book.begin_text()
        self._method = book.cheapest()
        self._is_resting = not book.is_worth_starting()
        self._is_trial = self._has_resumed = self._is_partial = self._is_draft_busy = False
        self._num_right_at_last = 0
        self._num_steps = 0
        self._is_draft_synced = not self._is_resting
        self._side: SideWindow | None = None
        self._ask_at = 0
        self._pause_tokens = _FIRST_HOPELESS_PAUSE if self._is_resting else _FIRST_PAUSE
        self._gamma = self._unproven_gamma = self.request.gamma
        if self.request.windows is None:
            self._unproven_gamma = min(_UNPROVEN_GAMMA, self._gamma)
        self.request.gamma = self._unproven_gamma
        self._queued_s = self._started = self._settled_s = 0.0

    @property
    def name(self) -> str:
        """The method of the step that is about to begin."""
        return self._method

    def start(self, read_prompt: Callable[[], None]) -> NDArray[np.int64]:
        """Prefill both devices at once; wait for a first window only if speculation is expected to pay.

        Where devices take turns, the window on the side is waited for: drafting it is part of decoding, not of the
        prompt, and comes after it.
        """
        window = NO_TOKENS
        if not self._is_resting:
            window = self._serial.start(read_prompt)
        elif not self._serial.draft.takes_turns:
            self._ask_first()
            read_prompt()
        else:
            read_prompt()
            self._ask_first()
        return self._settle(InFlight(self.request.num_tokens - 1, window)).window

    def _ask_first(self) -> None:
        if self._serial.draft.is_ready() and self._book.may_ask():
            self._side = SideWindow(self._serial)
            if self._side.is_there:
                self._book.pay_for_asking(self.request.ledger.now() - self._side.asked)

    def begin(self, inflight: InFlight) -> Beside | None:
        """See `WindowSource.begin`."""
        self._started, self._queued_s = self.request.ledger.now(), self.request.ledger.queued_s
        return None if self._method == "plain" else self._sources[self._method].begin(inflight)

    def next(self, inflight: InFlight, acceptance: Acceptance) -> Found:
        """The window of the method that ran; then settle on the method of the next step, which may want another."""
        found = Found() if self._method == "plain" else self._sources[self._method].next(inflight, acceptance)
        self._learn(inflight, acceptance)
        return Found(self._settle(InFlight(self.request.num_tokens - 1, found.window)).window, found.source)

    def observe(self, step: StepRecord) -> None:
        """See `WindowSource.observe`; what settling took belongs to the next step."""
        if step.method != "plain":
            self._serial.observe(step._replace(own_seconds=step.own_seconds - self._settled_s))

    def _settle(self, inflight: InFlight) -> InFlight:
        """Choose the method of the next step, and the window that fits it."""
        started, side = self.request.ledger.now(), self._side
        self._has_resumed = False
        inflight = self._choose(inflight)
        self._is_partial = self._has_resumed or (self._method == "plain" and len(inflight.window) > 0)
        has_asked = self._side is not None and self._side is not side
        self._is_draft_busy = has_asked or (self._side is not None and not self._side.is_there)
        if self._method == "plain" and not len(inflight.window):
            inflight = InFlight(inflight.head, self._free_rows.guess())
        self._settled_s = self.request.ledger.now() - started
        return inflight

    def _learn(self, inflight: InFlight, acceptance: Acceptance) -> None:
        ledger = self.request.ledger
        self._num_steps += 1
        seconds = self._settled_s + ledger.now() - self._started - (ledger.queued_s - self._queued_s)
        if self._method == "serial":
            self._observe_pace(len(inflight.window))
        is_last = self._method == "plain" and self._is_partial and not self._is_trial
        self._num_right_at_last = acceptance.num_accepted if is_last else 0
        if not self._serial.draft.is_preparing:  # a step beside a compiler teaches nothing
            self._book.observe(
                self._method,
                seconds,
                acceptance.num_accepted + 1,
                is_disturbed=self._is_draft_busy,
                is_partial=self._is_partial,
            )
        if self._book.earned > 0.0:
            self.request.gamma = self._gamma

    def _observe_pace(self, num_window: int) -> None:
        """Tell the book how fast the target is now: in serial decoding nothing runs beside it."""
        request = self.request
        if request.windows is not None:
            spans = takewhile(lambda span: span.start >= self._started, reversed(request.ledger.spans))
            seconds = sum(span.seconds for span in spans if span.is_of_pass)
            self._book.observe_pace(seconds / request.windows.pass_seconds(1 + num_window))

    def close(self) -> None:
        """Leave nothing running."""
        for source in self._sources.values():
            source.close()

    def _choose(self, inflight: InFlight) -> InFlight:
        """Settle on a method, and make the window in flight fit it."""
        if not self._serial.draft.is_ready():
            self._run("plain", is_trial=False)
        elif self._is_resting:
            return self._look_aside(inflight)
        else:
            method, is_trial = self._next_method()
            self._run(method, is_trial=is_trial)
            if method == "plain" and not is_trial and not len(inflight.window):
                self._rest()
        return self._prepare(inflight)

    def _next_method(self) -> tuple[str, bool]:
        """What the book says; but a last window that would have paid, verified by plain decoding, goes on."""
        paid = self._book.method_for(self._num_right_at_last)
        if paid is None:
            return self._book.next_method(self._method, self._num_steps, is_trial=self._is_trial)
        self._book.resume()
        return paid, True

    def _run(self, method: str, *, is_trial: bool) -> None:
        if method != self._method:
            self._num_steps = 0
        self._method, self._is_trial = method, is_trial

    def _prepare(self, inflight: InFlight) -> InFlight:
        """A fresh window when the draft comes back from a trial of plain decoding.

        The window that plain decoding finds in flight is verified: drafting it is what was dear.
        """
        if self._method == "plain":
            self._is_draft_synced = False
            return inflight
        if self._is_draft_synced:
            return inflight
        self._is_draft_synced = True
        return InFlight(inflight.head, self._serial.draft_window())

    def _rest(self) -> None:
        """Decode plainly from here on; the text is unproven again."""
        self._is_resting = True
        self._book.earned = 0.0
        self.request.gamma = self._unproven_gamma
        self._ask_at = self.request.num_tokens + self._pause_tokens // _FIRST_ASK

    def _look_aside(self, inflight: InFlight) -> InFlight:
        """Go on plainly, unless a window on the side has shown that speculation would pay."""
        self._run("plain", is_trial=False)
        side = self._side
        if side is None:
            if self.request.num_tokens >= self._ask_at and self._book.may_ask():
                self._side = SideWindow(self._serial)
        elif not side.is_there:
            self._serial.draft.check_answer(side.asked)
        else:
            method = self._book.method_for(side.num_right, is_whole=not len(side.rest))
            if method is not None and not side.is_refuted:
                rest = self._serial.draft_window() if side.is_overtaken else side.rest
                return self._resume(method, InFlight(inflight.head, rest))
            if side.is_refuted or not len(side.rest):
                self._dismiss()
        return self._prepare(inflight)

    def _dismiss(self) -> None:
        self._side = None
        self._book.asking.settle()
        self._ask_at = self.request.num_tokens + self._pause_tokens
        self._pause_tokens = min(3 * self._pause_tokens, _LONGEST_PAUSE)

    def _resume(self, method: str, inflight: InFlight) -> InFlight:
        """Speculate again, with what is left of the window: the draft's chain has it already."""
        self._dismiss()
        self._book.resume()
        if self._book.cheapest() != "plain":
            self._pause_tokens = _FIRST_PAUSE
        self._run(method, is_trial=True)
        self._is_resting, self._is_draft_synced, self._has_resumed = False, True, True
        return inflight
