"""What a window is worth: how many tokens of it to verify, and which rounds of the draft to make for it.

A row more costs little where the target's time is flat in rows and much where it is not, and a token is worth what the
text's speed makes of it: both are measured, so the same rule gives long windows on a GPU, short ones on int8 weights on
a processor, and none on a text that the draft does not know. The same account says whether another pass of the draft
pays, and which rows a round has: every guess that is fed costs one, and is kept only if the row before it confirms it.
Does not own how roots are chosen (`roots`) nor whether to draft at all (`account`). Changes no token.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, tanh
from operator import mul, sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.runtime.ledger import ALONE, RATE_MEMORY, AcceptanceRate
from mirrorsd.runtime.policy.roots import RowWeights
from mirrorsd.texts.config import LONGEST_WINDOW

Share = Sequence[float]
"""Two logs: of a token's share among the candidates of its row, and of the best other one's."""
# Behind a number: what others do to the speed, over that with it. 20 recorded texts of the sample pair in simulated
# time, by serial, mirror and `auto`, greedy and at T=1, at the times of `paced-laptop` and of int8 weights on a
# processor: lowest and highest of the twelve.
_LEAST_REPEAT = 0.1
"""Tokens that a repeat must be worth. On the sample pair 0, 1 and 2 differ by 1 % at most. SmolLM2's chats, whose
second row costs next to nothing, are 9 % slower with 1 by calculation, the same with 0."""
_FIRST_GAIN = 0.8
"""Tokens that one more pass brings, before any was seen. 0.4: 1.00 to 1.04. 1.6: 0.99 to 1.02."""
_SUREST = 0.995
"""No token is likelier right. 0.97: 0.99 to 1.01. 1: 0.99 to 1.00."""
_TRIAL_SHARE = 0.01
"""Of every token, what is put aside for passes that seem not to pay. 0: 1.00 to 1.04. 0.04: 0.99 to 1.01."""
_LEAST_CONFIRMED = 0.5
"""Chance that what was confirmed is right, below which a pass teaches too little to be tried. 0: 0.98 to 1.02. 0.9:
1.00 to 1.03."""
_RATIO_MEMORY = 0.98
"""Of what happened over what was expected, per case. 0.9: 0.99 to 1.02. 0.995: 0.99 to 1.01."""
_PRIOR = 5.0
"""Cases that the first expectation counts for. 1: 0.98 to 1.05. 20: 0.99 to 1.03."""
_LENGTHS = (1, 2, 3, 4, 6, 9, 14)
"""Longest agreement of each class of repeats but the last."""
_FIRST_OF_REPEATS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
_FIRST_AGAINST_DRAFT = 0.5
"""Of the chance of a repeat, where the draft thinks otherwise, before any such case was seen."""
MOST_COMPARED = _LENGTHS[-1] + 1
"""Tokens before two places that are compared: more agreement says nothing more."""


class WindowOrder(NamedTuple):
    """What the draft is asked for: at most `limit` tokens in at most `passes` passes; `length` cuts them."""

    limit: int
    passes: int
    length: "WindowLength | None" = None


class Ratio:
    """How much of something came true, over how much was expected."""

    def __init__(self, first: float = 1.0) -> None:
        self.happened, self.expected = first * _PRIOR, _PRIOR

    def observe(self, happened: float, expected: float) -> None:
        """Learn from one case."""
        self.happened = _RATIO_MEMORY * self.happened + happened
        self.expected = _RATIO_MEMORY * self.expected + expected

    @property
    def value(self) -> float:
        """1 where expectations are right."""
        return self.happened / self.expected


class RepeatChances:
    """How often the next token is the one that followed before, by how many tokens before it agree."""

    def __init__(self) -> None:
        self.shares = [Ratio(first) for first in _FIRST_OF_REPEATS]
        self.against_draft = Ratio(_FIRST_AGAINST_DRAFT)

    def observe(self, length: int, *, is_right: bool) -> None:
        """Learn from one token."""
        self._share(length).observe(float(is_right), 1.0)

    def chance(self, length: int, truth: float = 1.0) -> float:
        """That the next token is right, in a text whose repeats have come true `truth` times as often as expected.

        The odds are that many times as high: what was nearly sure stays so.
        """
        chance = min(self._share(length).value, _SUREST)
        return min(truth * chance / (1 - chance + truth * chance), _SUREST)

    def settle(self, chance: float, *, is_right: bool) -> None:
        """Learn from a token of this chance that a draft, which has read the text too, did not think likeliest."""
        self.against_draft.observe(float(is_right), chance)

    def share(self, chance: float) -> float:
        """What it counts beside a draft: as much of its chance as came true where they disagreed."""
        return min(self.against_draft.value, 1.0) * chance

    def reach(self, length: int, count: int, truth: float = 1.0) -> list[float]:
        """Chance of each of the next `count` tokens to be right, and all before it; `truth` as of `chance`."""
        chances, stop = list[float](), length + count
        while length < stop:  # ends of a class have one chance
            of_class = bisect_left(_LENGTHS, length)
            last = min(_LENGTHS[of_class] + 1, stop) if of_class < len(_LENGTHS) else stop
            chances += [self.chance(length, truth)] * (last - length)
            length = last
        return [*accumulate(chances, mul)]

    def _share(self, length: int) -> Ratio:
        return self.shares[bisect_left(_LENGTHS, length)]


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
        siblings: of tokens beside a window.
    """

    def __init__(self, tokens_per_second: float = 0.0) -> None:
        self.tokens_per_second = tokens_per_second
        self.main, self.stream = Ratio(), Ratio()
        self.gains = [Ratio(_FIRST_GAIN) for _ in range(LONGEST_WINDOW + 2)]
        self.aside = 0.0
        self.repeats = RepeatChances()
        self.siblings = Ratio()


class Reach(NamedTuple):
    """Of every token: `chances`, given those before it and before what texts have taught; `reach`, after, of all."""

    chances: list[float]
    reach: list[float]


class WindowLength:
    """Cuts the windows of one request. Plain floats: a dozen tokens are too few for arrays to be fast.

    Attributes:
        learned: what texts have taught about such windows.
        slowdown: how many times longer passes take now than was measured.
        joint: the pass that conversations share: all of them wait for a guessed row.
        budget: tokens that the passes of the draft for a window may cost in all; `auto` says so, nobody else minds.
        worth: of the window that was cut last, in tokens.
    """

    def __init__(self, target_ms: Curve, weights: RowWeights, learned: LearnedLengths) -> None:
        """Use a target whose pass takes `target_ms` (`[rows, ms]` points), and a draft judged by `weights`.

        `weights` are those of `RootWeights.accept` where only the draft is known.
        """
        self._pass_seconds = [interpolate(target_ms, rows) / 1e3 for rows in range(1, LONGEST_WINDOW + 3)]
        self._row_seconds = [after - before for before, after in pairwise(self._pass_seconds)]
        self._weights, self.learned = weights, learned
        self._acceptance_rate = AcceptanceRate()
        self._expected: list[tuple[float, bool]] = []
        self._verified: list[tuple[float, bool]] = []
        self._awaited: tuple[int, float, float] | None = None
        self.slowdown, self.budget, self.joint = 1.0, inf, ALONE
        self.worth = 0.0

    def pass_seconds(self, num_rows: int) -> float:
        """What a pass of the target takes, by the times that were measured."""
        return self._pass_seconds[min(num_rows, len(self._pass_seconds)) - 1]

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

    def cut_repeat(self, reach: Callable[[int], Sequence[float]], limit: int, least: float) -> int:
        """How many tokens of a repeat to verify, at most `limit`; 0 if that is not worth more than `least` tokens.

        Nor is a repeat taken that is hardly worth anything: in texts that nothing foresees, such guesses cost more than
        they seem to. `reach(n)` is the chance of each of the next `n` tokens to be right, and all before it. More than
        `limit` are asked for: what is sure once a few tokens were right is better left to the step after them. Mostly
        the first tell that there is nothing to gain, as none of the others is likelier.
        """
        least, few = max(least, _LEAST_REPEAT), 4
        while few < limit:
            first = reach(few)
            if not first or max(self._worths(first)) + (limit - few) * first[-1] <= least:
                return 0
            few *= 2
        whole = reach(2 * limit + 1)
        worths = self._worths(whole[:limit])
        return self._split_repeat(whole, worths) if max(worths) > least else 0

    def _split_repeat(self, reach: Sequence[float], worths: Sequence[float]) -> int:
        """How many tokens of a repeat to verify now, if the step after it goes on with what is left.

        The target's own token is one more of the repeat then: with `n` right tokens, the next window begins behind
        `n + 1`. It is worth no more than all that are left would be without their rows, which rules most `n` out.
        """
        limit, left = len(worths) - 1, sum(reach)
        costs = [-worth for worth in self._worths([0.0] * limit)]
        best, length = -inf, 0
        for count, (worth, right) in enumerate(zip(worths, reach, strict=False)):
            left -= right
            if worth + left > best:
                behind = accumulate(reach[count + 1 : count + 1 + limit], initial=0.0)
                worth += max(map(sub, behind, map(right.__mul__, costs)))
                best, length = (worth, count) if worth > best else (best, length)
        return length

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
        loss = self.speed * seconds - self.learned.gains[passes].value * confirmed
        is_made = loss < 0 or self._is_tried(loss, confirmed)
        if is_made:
            self._awaited = (passes, value, confirmed)
        return is_made

    def _is_tried(self, loss: float, confirmed: float) -> bool:
        learned = self.learned
        can_be_paid = confirmed >= _LEAST_CONFIRMED and loss <= learned.aside
        learned.aside -= loss if can_be_paid else 0.0
        return can_be_paid

    def _learn_gain(self, value: float) -> None:
        """A window is worth `value` tokens now: note what the pass that was thought worthwhile has added."""
        if self._awaited is not None:
            passes, before, confirmed = self._awaited
            self.learned.gains[passes].observe(value - before, confirmed)
            self._awaited = None

    def begin(self) -> None:
        """The window that was cut last is verified from now on: the next one is cut before this one's step is over."""
        if self._expected:
            self._verified, self._expected = self._expected, []

    def observe(self, num_window: int, num_accepted: int, seconds: float, num_aside: int = 0) -> None:
        """Learn from a step of `seconds`: `num_accepted` of `num_window` tokens were right, `num_aside` beside."""
        learned, num_tried = self.learned, min(num_accepted + 1, num_window)
        if num_window == len(self._verified):
            for row, (chance, is_main) in enumerate(self._verified[:num_tried]):
                (learned.main if is_main else learned.stream).observe(row < num_accepted, chance)
        self._acceptance_rate.observe(num_window, num_accepted)
        self._verified = []
        num_tokens = 1 + num_accepted + num_aside
        learned.aside += _TRIAL_SHARE * num_tokens
        speed = num_tokens / max(seconds, 1e-9)
        known = learned.tokens_per_second
        learned.tokens_per_second = 1 / (RATE_MEMORY / known + (1 - RATE_MEMORY) / speed) if known else speed

    @property
    def speed(self) -> float:
        """Tokens per second of the text, lately; at least what plain decoding brings in this company."""
        plain_seconds = self.joint.texts_s or self.slowdown * self.pass_seconds(1 + self.joint.num_beside)
        return max(self.learned.tokens_per_second, 1.0 / max(plain_seconds, 1e-9))

    def _reach(self, shares: Sequence[Share], num_main: int) -> Reach:
        weights = self._weights
        constant = weights.constant + weights.rate * self._acceptance_rate.log_odds
        of_own, of_other, of_row = weights.by_draft, weights.other_by_draft, weights.row
        main, stream = self.learned.main.value, self.learned.stream.value
        found, so_far = Reach([], []), 1.0
        for row, (own, other) in enumerate(shares):
            log_odds = constant + of_own * own + of_other * other + of_row * row / 10
            chance = (1 + tanh(log_odds / 2)) / 2
            so_far *= min(chance * (main if row < num_main else stream), _SUREST)
            found.chances.append(chance)
            found.reach.append(so_far)
        return found

    def reach(self, shares: Sequence[Share], num_main: int) -> list[float]:
        """Chance of each token to be right, and all before it; see `cut`."""
        return self._reach(shares, num_main).reach

    def row_costs(self, first: int, count: int) -> list[float]:
        """Tokens that all lose by `count` guesses behind `first` others, and behind the rows of other conversations."""
        joint, speed = self.joint, self.speed * (1 + self.joint.num_beside)
        seconds = [self.slowdown * one for one in self._row_seconds[first + joint.num_beside :][:count]]
        return [speed * (joint.guess_s or one) for one in seconds]

    def _worths(self, reach: Sequence[float]) -> list[float]:
        """What windows of `0 .. n` tokens bring, in tokens, less what their rows' time would have brought to all."""
        return [*accumulate(map(sub, reach, self.row_costs(0, len(reach))), initial=0.0)]


class Confirmations:
    """How often the draft confirms its own guesses: by place in the pass, given that all before were confirmed."""

    def __init__(self, num_streams: int) -> None:
        self._chances = np.ones(num_streams)

    def observe(self, num_fed: int, num_kept: int) -> None:
        """Learn from a branch of which `num_fed` guesses were fed and `num_kept` kept (the first always is).

        >>> seen = Confirmations(3); seen.observe(4, 2)
        >>> seen.chances(4).round(4).tolist()
        [1.0, 1.0, 0.95, 0.95]
        """
        tried = min(num_kept, num_fed - 1, len(self._chances))
        self._chances[:tried] *= RATE_MEMORY
        self._chances[: min(num_kept - 1, tried)] += 1 - RATE_MEMORY

    def chances(self, num_guesses: int) -> NDArray[np.float64]:
        """Chance of each of a branch's guesses to be kept, `[num_guesses]`; the first one's is 1."""
        places = np.minimum(np.arange(num_guesses - 1), len(self._chances) - 1)
        return np.concatenate([[1.0], np.cumprod(self._chances[places])])


def share_out(worths: Sequence[Sequence[float]], num_rows: int) -> list[int]:
    """How many of its rows each branch gets: the `num_rows` worthiest of all, those of a branch in their order.

    `worths[b]` are the worths of branch `b`'s rows; none is worthier than the row before it.

    >>> share_out([[8.0, 4.0, 2.0], [3.0, 1.0]], 3)
    [2, 1]
    """
    offers = sorted((-worth, branch) for branch, rows in enumerate(worths) for worth in rows)
    shares = [0] * len(worths)
    for _, branch in offers[:num_rows]:
        shares[branch] += 1
    return shares


def worth_by_rows(worths: Sequence[Sequence[float]], num_lead: int) -> NDArray[np.float64]:
    """What rounds of `0 ..` rows are worth, of which the first `num_lead` feed the chain and are worth nothing.

    >>> worth_by_rows([[8.0, 4.0], [3.0]], 1).tolist()
    [0.0, 0.0, 8.0, 12.0, 15.0]
    """
    offers = np.sort([worth for rows in worths for worth in rows])[::-1]
    return np.concatenate([np.zeros(num_lead + 1), np.cumsum(offers)])
