"""What a token of one method costs: the time of its steps, which is its own, over what steps bring, which is shared.

How many tokens a step of speculation brings is mostly the text's and the draft's doing, whichever method runs it. So
the methods share one running mean of that (`Luck`), and each keeps only how its steps compare with it: a few steps of a
method on a hard passage say little about the method, and do not count against it.
"""

_MEMORY, _LONG_MEMORY = 0.95, 0.99
_COMPARED_STEPS = 10
_PRIOR_TOKENS, _KNOWN_TOKENS, _KNOWN_STEPS = 30.0, 100.0, 6


class Luck:
    """Tokens that a step brings lately."""

    def __init__(self) -> None:
        self._tokens = self._steps = 0.0
        self._usual = 0.0
        self._runner: TokenCost | None = None
        self._num_run = 0

    @property
    def tokens_per_step(self) -> float:
        """The running mean; 0 until measured."""
        return self._tokens / self._steps if self._steps else 0.0

    def steps_since(self, runner: "TokenCost") -> int:
        """Steps since `runner` took over; while there are few, the mean is mostly another's."""
        return self._num_run if self._runner is runner else 0

    def observe(self, num_tokens: float, num_steps: int = 1, runner: "TokenCost | None" = None) -> None:
        """Learn from steps of `runner` that brought `num_tokens` each."""
        self._usual = _LONG_MEMORY * (self._usual or num_tokens) + (1 - _LONG_MEMORY) * num_tokens
        self._num_run = self.steps_since(runner) + num_steps if runner else 0
        self._runner = runner
        self._steps = _MEMORY * self._steps + num_steps
        self._tokens = _MEMORY * self._tokens + num_steps * num_tokens

    def begin_text(self) -> None:
        """Forget how the last text has ended: a new one is expected to be like most."""
        if self._steps:
            self._steps, self._tokens = _KNOWN_STEPS, _KNOWN_STEPS * self._usual


class TokenCost:
    """Seconds per token of one method, and when it deserves another trial.

    Attributes:
        num_steps: how many of its steps were measured.
        pause_tokens: tokens from one trial to the next.
        tokens_since: tokens since it last ran.
    """

    def __init__(self, luck: Luck, pause_tokens: float) -> None:
        self.num_steps = 0
        self.pause_tokens = pause_tokens
        self.tokens_since = 0
        self._luck = luck
        self._seconds = self._steps = 0.0
        self._brought = self._expected = 0.0

    @property
    def tokens_per_step(self) -> float:
        """What its step brings lately, as far as the luck of all says; 1 until measured."""
        return self._luck.tokens_per_step * self._share if self.num_steps else 1.0

    @property
    def seconds_per_step(self) -> float:
        """The running mean; 0 until measured."""
        return self._seconds / self._steps if self._steps else 0.0

    @property
    def seconds_per_token(self) -> float:
        """What a token costs lately; infinite until measured."""
        return self.seconds_per_step / self.tokens_per_step if self.num_steps else float("inf")

    def observe(self, seconds: float, num_tokens: float) -> None:
        """Learn from one step."""
        self.num_steps += 1
        if self._luck.steps_since(self) < _COMPARED_STEPS:
            self._brought = _LONG_MEMORY * self._brought + num_tokens
            self._expected = _LONG_MEMORY * self._expected + (self._luck.tokens_per_step or num_tokens)
        self._luck.observe(num_tokens / self._share, runner=self)
        self._steps = _MEMORY * self._steps + 1
        self._seconds = _MEMORY * self._seconds + seconds

    def start_from(self, seconds_per_step: float, share: float) -> None:
        """Begin with a step's time, and with `share` times the tokens that the luck of all says."""
        self.num_steps = _KNOWN_STEPS
        self._steps, self._seconds = float(_KNOWN_STEPS), _KNOWN_STEPS * seconds_per_step
        self._brought, self._expected = share * _KNOWN_TOKENS, _KNOWN_TOKENS

    @property
    def _share(self) -> float:
        return (_PRIOR_TOKENS + self._brought) / (_PRIOR_TOKENS + self._expected)
