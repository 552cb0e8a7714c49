"""How long a window is: as many tokens as are likely enough to be right for what their rows cost the target.

A row more costs little where the target's time is flat in rows and much where it is not, and a token is worth what the
text's speed makes of it: both are measured, so the same rule gives long windows on a GPU, short ones on int8 weights on
a processor, and none on a text that the draft does not know. The same account says whether another pass of the draft
pays. Does not own how roots are chosen (`planner`) nor which method runs (`cost_book`). Changes no token.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, inf, log
from typing import NamedTuple

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.runtime.policy.repeats import RepeatChances
from mirrorsd.runtime.policy.times import Ratio

Share = Sequence[float]
"""Two logs: of a token's share among the candidates of its row, and of the best other one's."""
_MOST_ROWS = 33
_FIRST_RATE, _RATE_MEMORY, _LEAST_RATE = 0.6, 0.95, 0.02
_SPEED_MEMORY = 0.95
_LEAST_REPEAT = 1.0
_FIRST_GAIN = 0.8
_SUREST = 0.995
_TRIAL_SHARE, _MOST_ASIDE = 0.01, 2.0
"""Of every token, what is put aside for passes that seem not to pay, and the most that is kept: in tokens' time."""
_LEAST_CONFIRMED = 0.5
"""Chance that what was confirmed is right, below which a pass teaches too little to be tried."""


class WindowOrder(NamedTuple):
    """What the draft is asked for: at most `limit` tokens in at most `passes` passes; `length` cuts them."""

    limit: int
    passes: int
    length: "WindowLength | None" = None


class LearnedLengths:
    """What texts teach about windows, kept from request to request; greedy and sampled texts have one each.

    Attributes:
        tokens_per_second: of steps with windows, lately; 0 before the first.
        main: of tokens that the draft's main row chose.
        stream: of tokens that only a stream has guessed.
        gains: expected tokens that one more pass has brought, by passes before it, per unit of chance that what was
            confirmed before it is right.
        aside: what may be spent on passes that seem not to pay: texts change, and a pass that is never made would
            seem so for ever.
        repeats: how often texts go on as they did where they repeat themselves.
    """

    def __init__(self, tokens_per_second: float = 0.0) -> None:
        self.tokens_per_second = tokens_per_second
        self.main, self.stream = Ratio(), Ratio()
        self.gains = [Ratio(_FIRST_GAIN) for _ in range(_MOST_ROWS)]
        self.aside = 0.0
        self.repeats = RepeatChances()


class Reach(NamedTuple):
    """Of every token: `chances`, given those before it and before what texts have taught; `reach`, after, of all."""

    chances: list[float]
    reach: list[float]


class WindowLength:
    """Cuts the windows of one request. Plain floats: a dozen tokens are too few for arrays to be fast.

    Attributes:
        slowdown: how many times longer passes take now than was measured.
        budget: tokens that the passes of the draft for a window may cost in all; `auto` says so, nobody else minds.
        worth: of the window that was cut last, in tokens.
    """

    def __init__(self, target_ms: Curve, weights: tuple[float, ...], learned: LearnedLengths) -> None:
        """Use a target whose pass takes `target_ms` (`[rows, ms]` points), and a draft judged by `weights`.

        `weights` are those of `RootWeights.accept` where only the draft is known.
        """
        self._pass_seconds = [interpolate(target_ms, rows) / 1e3 for rows in range(1, _MOST_ROWS + 1)]
        self._row_seconds = [after - before for before, after in pairwise(self._pass_seconds)]
        self._weights, self._learned = weights, learned
        self._acceptance_rate = _FIRST_RATE
        self._expected: list[tuple[float, bool]] = []
        self._awaited: tuple[int, float, float] | None = None
        self.slowdown, self.budget = 1.0, inf
        self.worth = 0.0

    def pass_seconds(self, num_rows: int) -> float:
        """What a pass of the target takes, by the times that were measured."""
        return self._pass_seconds[min(num_rows, _MOST_ROWS) - 1]

    def cut(self, shares: Sequence[Share], num_main: int, limit: int) -> int:
        """How many of a window's tokens to verify, at most `limit`.

        Args:
            shares: of each token.
            num_main: how many of them the draft's main row chose, the others being streams' guesses.
            limit: the most that can be useful.
        """
        found = self._reach(shares[:limit], num_main)
        worths = self._worths(found.reach)
        best = max(worths)
        length = worths.index(best)
        self.worth = best
        self._learn_gain(best)
        self._expected = [(chance, row < num_main) for row, chance in enumerate(found.chances[:length])]
        return length

    @property
    def repeat_chances(self) -> RepeatChances:
        """How often texts go on as they did."""
        return self._learned.repeats

    def cut_repeat(self, reach: Sequence[float], least: float) -> int:
        """How many tokens of a repeat to verify; 0 if that is not worth more than `least` tokens.

        Nor is a repeat taken that is hardly worth anything: in texts that nothing foresees, such guesses cost more than
        they seem to. `reach` is the chance of each token to be right, and all before it.
        """
        worths = self._worths(reach)
        best = max(worths)
        return worths.index(best) if best > max(least, _LEAST_REPEAT) else 0

    def is_pass_worthwhile(self, shares: Sequence[Share], num_main: int, passes: int, seconds: float) -> bool:
        """Whether one more pass of the draft would pay, or be a trial that can be paid; it takes `seconds`.

        `passes` have been made. Learns what the last one has brought, as `cut` does of the last of all. See there for
        `shares` and `num_main`.
        """
        if self.speed * seconds * (passes + 1) > self.budget:
            return False
        reach = self._reach(shares, num_main).reach
        value = max(self._worths(reach))
        self._learn_gain(value)
        confirmed = reach[num_main - 1] if num_main else 1.0
        loss = self.speed * seconds - self._learned.gains[passes].value * confirmed
        is_made = loss < 0 or self._is_tried(loss, confirmed)
        if is_made:
            self._awaited = (passes, value, confirmed)
        return is_made

    def _is_tried(self, loss: float, confirmed: float) -> bool:
        learned = self._learned
        can_be_paid = confirmed >= _LEAST_CONFIRMED and loss <= learned.aside
        learned.aside -= loss if can_be_paid else 0.0
        return can_be_paid

    def _learn_gain(self, value: float) -> None:
        """A window is worth `value` tokens now: note what the pass that was thought worthwhile has added."""
        if self._awaited is not None:
            passes, before, confirmed = self._awaited
            self._learned.gains[passes].observe(value - before, confirmed)
            self._awaited = None

    def observe(self, num_window: int, num_accepted: int, seconds: float) -> None:
        """Learn from a step: `num_accepted` of `num_window` tokens were right, and it took `seconds`."""
        learned, num_tried = self._learned, min(num_accepted + 1, num_window)
        if num_window == len(self._expected):
            for row, (chance, is_main) in enumerate(self._expected[:num_tried]):
                (learned.main if is_main else learned.stream).observe(row < num_accepted, chance)
        for row in range(num_tried):
            rate = self._acceptance_rate
            self._acceptance_rate = _RATE_MEMORY * rate + (1 - _RATE_MEMORY) * (row < num_accepted)
        self._expected = []
        learned.aside = min(learned.aside + _TRIAL_SHARE * (1 + num_accepted), _MOST_ASIDE)
        speed = (1 + num_accepted) / max(seconds, 1e-9)
        known = learned.tokens_per_second
        learned.tokens_per_second = 1 / (_SPEED_MEMORY / known + (1 - _SPEED_MEMORY) / speed) if known else speed

    @property
    def speed(self) -> float:
        """Tokens per second of the text, lately; at least what plain decoding brings."""
        return max(self._learned.tokens_per_second, 1.0 / max(self.slowdown * self._pass_seconds[0], 1e-9))

    def _reach(self, shares: Sequence[Share], num_main: int) -> Reach:
        constant, of_own, _, of_other, _, of_row, of_rate = self._weights
        rate = min(max(self._acceptance_rate, _LEAST_RATE), 1 - _LEAST_RATE)
        constant += of_rate * log(rate / (1 - rate))
        main, stream = self._learned.main.value, self._learned.stream.value
        found, so_far = Reach([], []), 1.0
        for row, (own, other) in enumerate(shares):
            chance = 1 / (1 + exp(-(constant + of_own * own + of_other * other + of_row * row / 10)))
            so_far *= min(chance * (main if row < num_main else stream), _SUREST)
            found.chances.append(chance)
            found.reach.append(so_far)
        return found

    def _worths(self, reach: Sequence[float]) -> list[float]:
        """What windows of `0 .. n` tokens bring, in tokens, less what their rows' time would have brought."""
        speed = self.speed * self.slowdown
        gains = (right - speed * seconds for right, seconds in zip(reach, self._row_seconds, strict=False))
        return [0.0, *accumulate(gains)]
