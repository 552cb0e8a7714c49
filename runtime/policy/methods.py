"""What each method costs on a pipeline, and which one to run next: the knowledge behind `auto`.

Costs are kept per pipeline, so a new request starts with what the last ones taught. A method that may have become
faster is tried again for a few steps; the worse it was, the rarer. And there is a purse: every step of speculation pays
into it or out of it what it gained or lost against plain decoding. When it is empty, decoding goes on plainly until a
small share of the tokens has filled it again: what speculation can lose is bounded, whatever the text. Does not own the
steps (`controller`).
"""

from statistics import fmean

from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.policy.asking_budget import AskingBudget
from mirrorsd.runtime.policy.times import PlainPace
from mirrorsd.runtime.policy.token_cost import Luck, TokenCost

_TRIAL_STEPS = 6
_SWITCH_GAIN = 0.95
_TRIAL_SHARE = 0.005
_MIN_PAUSE_TOKENS, _MAX_PAUSE_TOKENS = 64, 4096
_FIRST_PLAIN_STEPS = 2
_PURSE_TOKENS, _PURSE_RESUMES, _PURSE_SHARE = 2.5, 0.75, 0.01
"""In plain tokens' time: what speculation may lose at once, from where it may go on, what a plain token pays in."""
_LEAST_START = 1.25
"""What a text begins with at least, where speculation is the fastest method on the whole."""
_STEP_SHARE = 0.5
"""What the purse must hold for another step, of what that step loses if nothing is right."""
_WHOLE_WINDOW = 3
_RECORD_MEMORY = 0.5
"""How much of what earlier texts have gained still counts after another text."""
_EARNED_SHARE, _MOST_EARNED = 0.5, 16.0
"""What was gained in the same text widens the purse, so that bad luck does not end what pays on the whole."""


class CostBook:
    """What every method costs on this pipeline, and which one to run next."""

    def __init__(self, methods: tuple[str, ...] = ("mirror", "serial", "plain")) -> None:
        self._luck, self._plain_luck = Luck(), Luck()
        self.costs = {
            method: TokenCost(self._plain_luck if method == "plain" else self._luck, _MIN_PAUSE_TOKENS)
            for method in methods
        }
        self.purse = _PURSE_TOKENS
        self.asking = AskingBudget()
        self.earned = 0.0
        self.is_saving = False
        self._gained = self._record = 0.0
        self._pace = PlainPace()
        self._plain_now = 0.0

    def start_from(self, tokens_per_second: dict[str, float], tokens_per_step: dict[str, float] | None = None) -> None:
        """Begin with what was measured before, as if each method had just run for a while."""
        tokens = {name: (tokens_per_step or {}).get(name, 1.0) for name in tokens_per_second}
        usual = fmean([brought for name, brought in tokens.items() if name != "plain"] or [1.0])
        self._luck.observe(usual, _TRIAL_STEPS)
        for name, speed in tokens_per_second.items():
            if name == "plain":
                self.costs[name].observe(1.0 / speed, 1)
            self.costs[name].start_from(tokens[name] / speed, 1.0 if name == "plain" else tokens[name] / usual)
        self._pace = PlainPace(self.costs["plain"].seconds_per_step if "plain" in tokens_per_second else 0.0)
        self._set_pauses()
        rivals = [cost for name, cost in self.costs.items() if name != "plain" and cost.num_steps]
        if rivals and self.cheapest() == "plain":
            step = min(cost.seconds_per_step for cost in rivals)
            self.asking.expect(step / self.costs["plain"].seconds_per_token - 1.0)

    def observe_pace(self, slowdown: float) -> None:
        """Learn that the target took, in the step that `observe` comes with, `slowdown` times what `tune` measured.

        Plain decoding does not run while speculation pays: this keeps its cost up with the machine. Passes of one row
        and of many need not slow down alike: real steps of plain decoding correct what this makes of it (`PlainPace`).
        """
        if self._pace.reference:
            plain, step_seconds = self.costs["plain"], self._pace.observe_pass(slowdown)
            self._plain_now = step_seconds / plain.tokens_per_step
            plain.observe(step_seconds, plain.tokens_per_step)

    @property
    def plain_tokens_per_second(self) -> float | None:
        """How fast plain decoding is lately; None until it was measured for a while, here or by `tune`."""
        plain = self.costs["plain"]
        return 1.0 / plain.seconds_per_token if plain.num_steps >= _TRIAL_STEPS else None

    def begin_text(self) -> None:
        """Let a new text risk no more than the first one: what others have earned is not its own to lose.

        It may risk as much where speculation has gained on the texts before, and little more than what is left where it
        has lost.
        """
        self._luck.begin_text()
        self._plain_luck.begin_text()
        if self.cheapest() != "plain":
            self.asking.begin_text()
        self._record = _RECORD_MEMORY * self._record + self._gained
        self.earned = self._gained = 0.0
        self.purse = _PURSE_TOKENS if self._record > 0 else min(self.purse, _PURSE_TOKENS)
        if self.cheapest() != "plain":
            self.purse = max(self.purse, _LEAST_START)
        self.is_saving = self.is_saving and self.purse < _PURSE_RESUMES

    def is_worth_starting(self) -> bool:
        """Whether a new text should speculate from its first step on."""
        is_known = self.costs["plain"].num_steps >= _FIRST_PLAIN_STEPS
        return is_known and not self.is_saving and self.cheapest() != "plain"

    def may_ask(self) -> bool:
        """Whether a window on the side is worth its cost now; always while there is a method that nobody knows."""
        return self.asking.is_enough or not all(cost.num_steps for cost in self.costs.values())

    def pay_for_asking(self, seconds: float) -> None:
        """Settle for a window on the side that was waited for outside of any step."""
        if self.costs["plain"].num_steps:
            self.asking.pay(seconds / self.costs["plain"].seconds_per_token)

    def method_for(self, num_right: int, *, is_whole: bool = False) -> str | None:
        """The method of speculation for which a window with so many right tokens would have paid; None if for none.

        A step that takes 2.2 plain tokens' time needs two right tokens; one that was never measured gets its trial for
        one. Three right ones that are the whole window (`is_whole`) always suffice: nobody knows how many more it were.
        """
        plain = self.costs["plain"]
        if plain.num_steps < _FIRST_PLAIN_STEPS or not num_right:
            return None
        rivals = [name for name in self.costs if name != "plain"]
        unmeasured = [name for name in rivals if not self.costs[name].num_steps]
        best = min(rivals, key=lambda name: self.costs[name].seconds_per_step)
        is_proof = is_whole and num_right >= _WHOLE_WINDOW
        if (
            not (unmeasured or is_proof)
            and (1 + num_right) * plain.seconds_per_token <= self.costs[best].seconds_per_step
        ):
            return None
        return unmeasured[0] if unmeasured else best

    def resume(self) -> None:
        """Let speculation have another go before the purse has filled by itself: there is evidence for it."""
        self.is_saving = False
        self.purse = max(self.purse, _PURSE_RESUMES)

    def observe(
        self, method: str, seconds: float, num_tokens: int, *, is_disturbed: bool = False, is_partial: bool = False
    ) -> None:
        """Learn from one step, let the others wait, and settle with the purse.

        Args:
            method: what ran.
            seconds: how long it took.
            num_tokens: what it brought.
            is_disturbed: the draft worked on the side: this is not what plain decoding costs.
            is_partial: it verified the rest of a window, or one and drafted no other: this is what no method costs.
        """
        plain = self.costs["plain"]
        if method == "plain" and not is_partial:
            self.purse += _PURSE_SHARE * num_tokens
            if is_disturbed and plain.num_steps:
                self.asking.pay(seconds / plain.seconds_per_token - num_tokens)
            self.asking.put_aside(num_tokens)
            if not is_disturbed:
                self._pace.observe_plain(seconds)
        elif plain.num_steps:
            if method == "plain":  # how much of a window came true is the same whoever verifies it
                self._luck.observe(num_tokens)
            gain = num_tokens - seconds / (self._plain_now or plain.seconds_per_token)
            self.purse += gain
            self._gained += gain
            self.earned = min(max(self.earned + gain, 0.0), _MOST_EARNED)
        self._plain_now = 0.0
        self.purse = min(self.purse, _PURSE_TOKENS + _EARNED_SHARE * self.earned)
        self.is_saving = self.purse < (_PURSE_RESUMES if self.is_saving else self._least_purse(method))
        for name, cost in self.costs.items():
            if name == method:
                if not (is_disturbed or is_partial):
                    cost.observe(seconds, num_tokens)
            else:
                cost.tokens_since += num_tokens

    def _least_purse(self, method: str) -> float:
        """What the purse must hold for another step: half of what it loses if nothing is right."""
        cost, plain = self.costs[method], self.costs["plain"]
        if method == "plain" or not plain.num_steps:
            return 0.0
        return max(0.0, _STEP_SHARE * (cost.seconds_per_step / plain.seconds_per_token - 1.0))

    def cheapest(self, but: str = "") -> str:
        """The method with the lowest cost per token, `but` left out."""
        return min((name for name in self.costs if name != but), key=lambda name: self.costs[name].seconds_per_token)

    def next_method(self, current: str, num_steps: int, *, is_trial: bool) -> tuple[str, bool]:
        """The method for the next step and whether it is on trial.

        Args:
            current: the method of the last step.
            num_steps: how many steps in a row it has run.
            is_trial: whether those were a trial.

        Plain decoding comes first, for two steps, and whenever the purse is empty. Then an unmeasured method. A trial
        ends after a few steps. Otherwise the current method goes on, unless another is cheaper by more than 5 %
        (hysteresis), or another's pause is over. From speculation back to plain decoding it is the purse that decides:
        a few steps of bad luck are not yet a text that defeats the draft.
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
        best = self.cheapest(but="" if is_trial or current == "plain" else "plain")
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
        """Wait so long between trials of a method that they cost about 0.5 % of the time.

        A method half as dear again as the best (excess 0.5) that brings 4 tokens a step wastes 12 tokens' time in 6
        steps: try again in 2,400 tokens.
        """
        self.costs[method].tokens_since = 0
        self._set_pauses()

    def _set_pauses(self) -> None:
        best = self.costs[self.cheapest()].seconds_per_token
        for cost in self.costs.values():
            excess = cost.seconds_per_token / best - 1.0
            wasted_tokens = _TRIAL_STEPS * cost.tokens_per_step * excess
            cost.pause_tokens = min(max(wasted_tokens / _TRIAL_SHARE, _MIN_PAUSE_TOKENS), _MAX_PAUSE_TOKENS)


class CostBooks:
    """A book for greedy texts and one for sampled ones: what a window is worth differs between them."""

    def __init__(self) -> None:
        self.greedy, self.sampled = CostBook(), CostBook()

    def of(self, config: GenerationConfig) -> CostBook:
        """The book for such a text."""
        return self.sampled if config.is_sampling else self.greedy
