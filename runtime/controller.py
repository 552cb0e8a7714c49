"""`auto`: never slower than plain decoding. Runs the fastest method, by what each one's tokens have cost lately.

Costs are kept per pipeline, so a new request starts with what the last ones taught. A method that may have become
faster is tried again for a few steps; the worse it was, the rarer. And there is a purse: every step of speculation pays
into it or out of it what it gained or lost against plain decoding. When it is empty, decoding goes on plainly until a
small share of the tokens has filled it again: what speculation can lose is bounded, whatever the text. Switching
changes no token.
"""

from mirrorsd.runtime.draft_chain import NO_TOKENS
from mirrorsd.runtime.drivers import InFlight, MirrorDriver, Outcome, PlainDriver, SerialDriver

_MEMORY = 0.9
_TRIAL_STEPS = 6
_SWITCH_GAIN = 0.95
_TRIAL_SHARE = 0.01
_MIN_PAUSE_TOKENS, _MAX_PAUSE_TOKENS = 64, 4096
_FIRST_PLAIN_STEPS = 2
_PURSE_TOKENS, _PURSE_RESUMES, _PURSE_SHARE = 1.5, 0.75, 0.012
"""In plain tokens' time: what speculation may lose at once, from where it may go on, what a plain token pays in."""
_EARNED_SHARE, _MOST_EARNED = 0.02, 125.0
"""What has been gained before widens the purse a little, so that bad luck does not end what pays on the whole."""


class TokenCost:
    """Seconds per token of one method: a running mean over steps, and when it deserves another trial."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.pause_tokens = float(_MIN_PAUSE_TOKENS)
        self.tokens_since = 0
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """The running mean; infinite until measured."""
        return self._seconds / self._tokens if self._tokens else float("inf")

    def observe(self, seconds: float, num_tokens: int) -> None:
        """Learn from one step."""
        self.num_steps += 1
        self._seconds = _MEMORY * self._seconds + seconds
        self._tokens = _MEMORY * self._tokens + num_tokens


class CostBook:
    """What every method costs on this pipeline, and which one to run next."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self.costs = {method: TokenCost() for method in methods}
        self.purse = _PURSE_TOKENS
        self.earned = 0.0
        self.is_saving = False

    def start_from(self, tokens_per_second: dict[str, float]) -> None:
        """Begin with speeds that were measured before, as if each method had just run for a while."""
        for name, speed in tokens_per_second.items():
            for _ in range(_TRIAL_STEPS):
                self.costs[name].observe(1.0 / speed, 1)

    def observe(self, method: str, seconds: float, num_tokens: int) -> None:
        """Learn from one step, let the others wait, and settle with the purse."""
        plain = self.costs["plain"]
        if method == "plain":
            self.purse += _PURSE_SHARE * num_tokens
        elif plain.num_steps:
            gain = num_tokens - seconds / plain.seconds_per_token
            self.purse += gain
            self.earned = min(max(self.earned + gain, 0.0), _MOST_EARNED)
        self.purse = min(self.purse, _PURSE_TOKENS + _EARNED_SHARE * self.earned)
        self.is_saving = self.purse < (_PURSE_RESUMES if self.is_saving else 0.0)
        for name, cost in self.costs.items():
            if name == method:
                cost.observe(seconds, num_tokens)
            else:
                cost.tokens_since += num_tokens

    def cheapest(self) -> str:
        """The method with the lowest cost per token."""
        return min(self.costs, key=lambda name: self.costs[name].seconds_per_token)

    def next_method(self, current: str, num_steps: int, *, is_trial: bool) -> tuple[str, bool]:
        """The method for the next step and whether it is on trial.

        Args:
            current: the method of the last step.
            num_steps: how many steps in a row it has run.
            is_trial: whether those were a trial.

        Plain decoding comes first, for two steps, and whenever the purse is empty. Then an unmeasured method. A trial
        ends after a few steps. Otherwise the current method goes on, unless another is cheaper by more than 5 %
        (hysteresis), or another's pause is over.
        """
        if self.is_saving or self.costs["plain"].num_steps < _FIRST_PLAIN_STEPS:
            if is_trial and self.costs["plain"].num_steps:
                self._end_trial(current)
            return "plain", False
        if num_steps < _TRIAL_STEPS and (is_trial or not self.costs[current].num_steps):
            return current, True
        unmeasured = [name for name, cost in self.costs.items() if not cost.num_steps]
        if unmeasured:
            return unmeasured[0], True
        best = self.cheapest()
        if is_trial:
            self._end_trial(current)
        if self.costs[best].seconds_per_token < _SWITCH_GAIN * self.costs[current].seconds_per_token:
            return best, False
        for name, cost in self.costs.items():
            if name != current and cost.tokens_since >= cost.pause_tokens:
                cost.tokens_since = 0
                return name, True
        return (best if is_trial else current), False

    def _end_trial(self, method: str) -> None:
        """Wait so long between trials of a method that they cost about 1 % of the time.

        A method half as fast again as the best (excess 0.5) wastes 3 tokens' time in 6 steps: try again in 300 tokens.
        """
        self.costs[method].tokens_since = 0
        best = self.costs[self.cheapest()].seconds_per_token
        for cost in self.costs.values():
            excess = cost.seconds_per_token / best - 1.0
            cost.pause_tokens = min(max(_TRIAL_STEPS * excess / _TRIAL_SHARE, _MIN_PAUSE_TOKENS), _MAX_PAUSE_TOKENS)


class AutoDriver:
    """Steps with whichever method is cheapest. Has the same face as the drivers it chooses from."""

    name = "auto"

    def __init__(self, plain: PlainDriver, serial: SerialDriver, mirror: MirrorDriver, book: CostBook) -> None:
        self.request = plain.request
        self._drivers: dict[str, PlainDriver] = {"mirror": mirror, "serial": serial, "plain": plain}
        self._serial = serial
        self._book = book
        self._method = book.cheapest()
        self._is_trial = False
        self._num_steps = 0
        self._is_draft_synced = True

    def start(self) -> InFlight:
        """Prefill both devices, whatever comes first: a switch must not have to wait for the draft's prefill."""
        return self._serial.start()

    def step(self, inflight: InFlight) -> Outcome:
        """One step of the method that is cheapest now."""
        started = self.request.ledger.now()
        self._choose()
        outcome = self._drivers[self._method].step(self._prepare(inflight))
        self._num_steps += 1
        self._book.observe(self._method, self.request.ledger.now() - started, len(outcome.tokens))
        return outcome

    def close(self) -> None:
        """Leave nothing running."""
        for driver in self._drivers.values():
            driver.close()

    def _choose(self) -> None:
        method, is_trial = self._book.next_method(self._method, self._num_steps, is_trial=self._is_trial)
        if not self._serial.draft.is_working():
            method, is_trial = "plain", False
        if method != self._method:
            self._num_steps = 0
        self._method, self._is_trial = method, is_trial

    def _prepare(self, inflight: InFlight) -> InFlight:
        """Make the window in flight fit the method: none for plain; a fresh one when the draft comes back."""
        if self._method == "plain":
            self._is_draft_synced = False
            return InFlight(inflight.head, NO_TOKENS)
        if self._is_draft_synced:
            return inflight
        self._is_draft_synced = True
        return InFlight(inflight.head, self._serial.draft_window())
