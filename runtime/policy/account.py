"""One account of worth: the tokens that something is expected to bring, less the text's speed times its seconds.

The speed is in tokens per second, the text's own lately, at least that of plain decoding; the seconds are those by
which the target waits longer. What is worth more than nothing is done. Declining the draft's first round is plain
decoding, so plain decoding needs no judgement of its own.

Expectations may be wrong, so every text also has a credit, in tokens. What it really gains or loses against plain
decoding goes in or out, and a small share of every token that was decoded plainly goes in. Where the credit does not
cover the next step, decoding goes on plainly. So the loss on any text is bounded by what it begins with and that share.

What texts have taught about a pair's sources is here too.
"""

from dataclasses import dataclass
from math import ceil

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.graphs.names import HEAD_KINDS
from mirrorsd.runtime.ledger import RATE_MEMORY, TIME_MEMORY, Estimate
from mirrorsd.runtime.policy.pace import PlainPace


@dataclass(frozen=True, slots=True)
class Constants:
    """What decides. Measured on recorded texts of an 82 M model in simulated time, over the speed of the best method.

    A draft that is never right costs 2.2 to 2.8 % of 128 sampled tokens with these. Two figures behind a number: what
    that does to the simulated speed of the sample pair's texts, as in `windows`.
    """

    first_credit: float = 2.25
    """Tokens that a text may lose before anything was gained, and what a window has gained lately. 3: 0.5 % more lost
    where nothing is right. 2: greedy
    int4 texts 2 to 5 % slower."""
    resumes: float = 0.75
    """What a text begins with where drafting is not expected to pay, and what a trial that has paid gives back.
    0.25: 1.00. 1.5: 1.00 to 1.09."""
    trial_share: float = 0.01
    """Of every plain token, what goes into the credit: what trials may cost for ever. 0 and 0.04: 1.00."""
    most_kept: float = 8.0
    """Tokens of what a text has gained that may be lost again, so that bad luck does not end what pays on the whole.
    0: 0.89 of the best method where a draft that is right in 7 of 10 cases is as slow as the target
    (`python -m pytest tests/unit/runtime/decoding/test_auto.py -k promises`, which asks for 0.92 and fails with 4)."""
    covered_share: float = 0.5
    """Of a window's drafting, what the credit must hold. 1: sampled int8 texts 10 % slower, hopeless ones the same."""
    memory: float = 0.985
    """Per token, of what windows are worth. 0.95: a hard passage ends drafting, sampled int8 texts 5 to 14 % slower."""
    head_pause: int = 64
    """As `first_pause`, of a head: it is tried beside sources that pay. 256: 0.99 to 1.01."""
    head_credit: float = 1.0
    """Tokens that a head may lose in a text, so what a window of one that is tried may cost."""
    looks: int = 1000
    """Steps over which it is averaged what looking for windows gains. 300: 3 % more steps where a fifth of the tokens
    repeat what was said, as texts that do so stand behind others that do not; 66: 9 %
    (`bench/claims/best_method.py --with looks=300`)."""
    first_pause: int = 4
    """Tokens between two trials; triples with each that has not paid. 1: 0.99 to 1.01. 16: 0.47 to 0.94."""

    @property
    def head_share(self) -> float:
        """What a window of a head changes at least of what its windows are worth: as a draft's, of two tokens, does."""
        return 1 - self.memory**2


_BY = Constants()
_KNOWN_STEPS = 2
"""Plain steps after which plain decoding counts as measured. 1: 1.00. 8: 0.70 to 0.98."""


class Attention:
    """When `auto` looks for windows at all: looking takes time, too, which counts where steps are short.

    Where it costs more than `trial_share` of plain decoding, and than what windows have gained on the whole, nobody
    looks for a while, then once.

    Attributes:
        left: tokens until somebody looks again.
    """

    def __init__(self) -> None:
        self.left, self._num_looked = 0, _BY.first_pause
        self._pause, self._gained, self._looking = _BY.first_pause, 1.0, Estimate()

    def observe(self, gain: float, seconds: float, speed: float) -> None:
        """Learn from a step that has gained so many tokens over plain decoding; looking took `seconds`."""
        self._num_looked = min(self._num_looked + 1, _BY.looks)
        self._gained += (max(gain, -1.0) - self._gained) / self._num_looked
        self._looking.observe(seconds)
        if (self._looking.seconds or 0.0) * speed <= max(self._gained, gain, _BY.trial_share):
            self._pause = _BY.first_pause
        else:
            self.left, self._pause = self._pause, min(3 * self._pause, _BY.head_pause)


class SourceKnowledge:
    """What texts teach about windows that have to be waited for: those of the draft, or of a head.

    Attributes:
        brought: what such a window is worth, in tokens, the waiting not counted; None until there was one.
        draft_seconds: what the target waits for one.
        joining_seconds: what it has waited longer for sources that had to read the text first, the last ones most.
        joining_tokens: how many tokens those had to read.
        since, pause: tokens since the last window, and between two trials of a source that does not seem to pay.
        num_windows: of a head, so many that `brought` is made of.
    """

    def __init__(self) -> None:
        self.brought: float | None = None
        self.draft_seconds = self.joining_seconds = 0.0
        self.joining_tokens = 0.0
        self.since, self.pause = 0, _BY.head_pause
        self.num_windows = 0

    def observe_drafting(self, seconds: float, num_missing: int) -> None:
        """Learn how long the target has waited for a window of a source that lacked so many tokens of the text."""
        if num_missing:
            self.joining_seconds = TIME_MEMORY * self.joining_seconds + max(seconds - self.draft_seconds, 0.0)
            self.joining_tokens = TIME_MEMORY * self.joining_tokens + num_missing
            return
        self.draft_seconds = TIME_MEMORY * (self.draft_seconds or seconds) + (1 - TIME_MEMORY) * seconds

    def reading_seconds(self, num_missing: int) -> float:
        """What reading so many tokens takes; 0 until measured."""
        return self.joining_seconds * num_missing / self.joining_tokens if self.joining_tokens else 0.0

    def observe_head(self, num_right: int, loss: float, promised: float, *, is_trial: bool) -> None:
        """Learn what a window of a head has really been worth, in tokens: `loss` is that of its rows.

        The first one counts twice what it `promised`: heads are surer of themselves than they are right.
        """
        self.num_windows += 1
        share = max(1 / (0.5 + self.num_windows), _BY.head_share)
        before = promised if self.brought is None else self.brought
        self.brought = before + share * (num_right - loss - before)
        self.since = 0
        if is_trial:
            self.pause = 3 * self.pause if num_right <= loss else _BY.head_pause


class PairKnowledge(SourceKnowledge):
    """What texts teach about drafting, kept from text to text; greedy and sampled texts have one each.

    Attributes:
        method: of speculation that `tune` found faster; empty where nothing was tuned.
        plain_seconds: what a step of plain decoding takes now; 0 until measured.
        plain_tokens: what it brings, free rows included.
        heads: the same of windows that heads guess, by their kind.
        attention: whether windows are looked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pause, self.method = _BY.first_pause, ""
        self.plain_seconds = 0.0
        self.plain_tokens = 1.0
        self.heads: dict[str, SourceKnowledge] = {}
        self.attention = Attention()
        self._num_plain = 0
        self._pace = PlainPace()

    def start_from(
        self, tokens_per_second: dict[str, float], tokens_per_step: dict[str, float], target_ms: Curve
    ) -> None:
        """Begin with what was measured before."""
        rivals = [name for name in ("serial", "mirror") if name in tokens_per_second]
        if not rivals or "plain" not in tokens_per_second:
            return
        self.method = max(rivals, key=lambda name: tokens_per_second[name])
        self.start_plain(1 / tokens_per_second["plain"])
        sources: dict[str, SourceKnowledge] = {rivals[0]: self}
        sources |= {
            kind: self.heads.setdefault(kind, SourceKnowledge()) for kind in HEAD_KINDS if kind in tokens_per_second
        }
        for name, source in sources.items():
            speed = max(tokens_per_second[name], tokens_per_second["plain"])
            num_tokens = tokens_per_step.get(name, 1.0)
            step_seconds = num_tokens / tokens_per_second[name]
            pass_seconds = interpolate(target_ms, round(num_tokens)) / 1e3 if target_ms else self.plain_seconds
            source.draft_seconds = max(step_seconds - pass_seconds, 0.0)
            source.num_windows = round(1 / _BY.head_share)
            source.brought = num_tokens - 1 - speed * max(pass_seconds - self.plain_seconds, 0.0)

    def start_plain(self, seconds: float) -> None:
        """Begin with what a step of plain decoding took before."""
        self.plain_seconds, self._num_plain = seconds, _KNOWN_STEPS
        self._pace = PlainPace(seconds)

    @property
    def is_plain_known(self) -> bool:
        """Whether plain decoding was measured."""
        return self._num_plain >= _KNOWN_STEPS

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding now; 0 until measured."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else 0.0

    def observe_plain(self, seconds: float, num_tokens: int) -> None:
        """Learn from a step of plain decoding beside which nothing ran."""
        self._pace.observe_plain(seconds)
        self._num_plain += 1
        self._follow(seconds)
        self.observe_free_rows(num_tokens)

    def observe_free_rows(self, num_tokens: int) -> None:
        """Learn how many tokens a step of plain decoding brings, or would have brought."""
        self.plain_tokens = RATE_MEMORY * self.plain_tokens + (1 - RATE_MEMORY) * num_tokens

    def observe_pass(self, slowdown: float) -> float:
        """Learn that a pass, beside which nothing ran, took `slowdown` times what was measured before.

        Returns what a plain step would have taken by that, in seconds; 0 where nothing was measured.
        """
        seconds = self._pace.observe_pass(slowdown)
        if seconds:
            self._follow(seconds)
        return seconds

    def _follow(self, seconds: float) -> None:
        known = self.plain_seconds or seconds
        self.plain_seconds = TIME_MEMORY * known + (1 - TIME_MEMORY) * min(seconds, 2 * known)


class Account:
    """What one text may spend, and what drafting is worth in it.

    Attributes:
        credit: in tokens.
        is_resting: whether the credit is used up: plain decoding, until it is there again or a trial would have paid.
    """

    def __init__(self, known: PairKnowledge) -> None:
        self._known = known
        self._brought = known.brought
        self.is_resting = False
        worth = 0.0 if self._brought is None else self._brought - self.cost(known)
        self._most_credit = _BY.first_credit + max(worth, 0.0)
        self.credit = self._most_credit if worth >= 0 else _BY.resumes
        self._tried: tuple[float, float] | None = None
        self._since, self._pause = known.since, _BY.first_pause
        self._num_plain = self._quiet_until = 0
        self._short = self._kept = 0.0

    def be_quiet(self, num_tokens: int, *, until_tried: bool) -> None:
        """Of a text of so many tokens: neither draft nor head pays, which is looked at again a few tokens on.

        `until_tried`: not before the pause is over, and plain tokens have put aside what a trial costs.
        """
        left = max(self._pause - self._since, ceil(self._short / _BY.trial_share)) if until_tried else 0
        self._quiet_until = num_tokens + (min(left, _BY.head_pause) if left > 0 else _BY.first_pause)
        self._short = 0.0

    def is_quiet(self, num_tokens: int) -> bool:
        """Whether it was looked at just before."""
        return num_tokens < self._quiet_until

    def worth_of_drafting(self, speed: float, *, is_ready: bool) -> float:
        """Tokens that a window of the draft should bring, less its time: asked for, or one that `is_ready`."""
        if self._brought is None or self.is_resting:
            return 0.0
        return self._brought - (0.0 if is_ready else self.cost(self._known, speed))

    def cost(self, source: SourceKnowledge, speed: float = 0.0) -> float:
        """Tokens that waiting for a window costs."""
        return source.draft_seconds * max(speed, self._known.plain_speed)

    def worth_of_head(self, head: SourceKnowledge, speed: float, lost: float) -> float:
        """As `worth_of_drafting`, of a head that has lost so much in this text: it has a credit of its own."""
        if head.brought is None or lost >= _BY.head_credit:
            return 0.0
        return head.brought - self.cost(head, speed)

    def may_try_head(self, head: SourceKnowledge, speed: float, lost: float) -> bool:
        """Whether a head that does not seem to pay may be tried: it was not for long, and its credit covers that."""
        is_due = head.brought is None or head.since >= head.pause
        return is_due and lost + self.cost(head, speed) <= _BY.head_credit

    def is_covered(self, speed: float, *, is_ready: bool) -> bool:
        """Whether the credit suffices for another window."""
        return not self.is_resting and (is_ready or self.credit >= _BY.covered_share * self.cost(self._known, speed))

    @property
    def is_trial_due(self) -> bool:
        """Whether the pause since the last window is over."""
        return self._known.is_plain_known and self._since >= self._pause

    def may_try(self, speed: float, num_missing: int, fresh_seconds: float = 0.0) -> bool:
        """Whether a window that does not seem to pay may be tried, of a draft that lacks so many tokens of the text.

        `fresh_seconds` are those of its rounds: what the target has waited for windows lately says little of one that
        begins with reading, least of all where they were prepared beside its passes.
        """
        known = self._known
        seconds = max(known.reading_seconds(num_missing) + known.draft_seconds, fresh_seconds if num_missing else 0.0)
        self._short = max(seconds * max(speed, known.plain_speed) - self.credit, 0.0)
        return self.is_trial_due and not self._short

    def may_join(self, speed: float, num_missing: int) -> bool:
        """Whether a draft that seems to pay may read so many tokens first, for which no text's credit is charged.

        It may once the text has forgone by plain steps what the reading costs, but for the credit: whoever does not
        know how long a text will be, nor how often it repeats itself, loses at most as much again.
        """
        known = self._known
        forgone = self._num_plain * self.worth_of_drafting(speed, is_ready=False) / (1.0 + (self._brought or 0.0))
        return known.reading_seconds(num_missing) * max(speed, known.plain_speed) <= self.credit + forgone

    def observe_window(self, worth: float, speed: float, *, is_trial: bool) -> None:
        """Learn what a drafted window is worth, its drafting not counted."""
        known = self._known
        share = _BY.memory ** max(self._since, 2)
        self._brought = worth if self._brought is None else share * self._brought + (1 - share) * worth
        known.brought = worth if known.brought is None else TIME_MEMORY * known.brought + (1 - TIME_MEMORY) * worth
        self._since = known.since = self._num_plain = 0
        self._tried = (worth, self.cost(known, speed)) if is_trial else None

    def verified(self, num_right: int) -> None:
        """A window was verified. Resume where one that was tried has paid: what it promised alone proves nothing."""
        if self._tried is None:
            return
        worth, loss = self._tried
        self._tried = None
        if num_right > loss:
            self._brought = max(self._brought or 0.0, worth)
            self.credit, self.is_resting = max(self.credit, _BY.resumes), False
            self._pause = _BY.first_pause
        else:
            self._pause = 3 * self._pause
        self._known.pause = self._pause

    def count(self, num_tokens: int) -> None:
        """So many tokens more without a window of the draft, as far as is known."""
        self._since += num_tokens
        self._known.since += num_tokens

    def observe_step_of_another(self, drafted_seconds: float, num_tokens: int) -> None:
        """Settle for a window of the draft behind a step of a head or a repeat, which are nothing that it can help.

        Heads settle for themselves; how good repeats are is learned from every token, whether they are verified or not.
        """
        self.count(num_tokens)
        self.credit -= drafted_seconds * self._known.plain_speed

    def observe_step_beside_others(self, num_tokens: int, *, is_plain: bool) -> None:
        """Settle for a step in company, whose seconds say nothing of plain decoding alone: its tokens count."""
        self.count(num_tokens)
        if is_plain:
            self._put_aside(num_tokens)

    def _put_aside(self, num_tokens: int) -> None:
        """A share of tokens that were decoded plainly, for trials and for a draft that has to read the text."""
        self._num_plain += num_tokens
        self.credit = min(self.credit + _BY.trial_share * num_tokens, self._most_credit + self._kept)

    def observe_step(
        self, seconds: float, drafted_seconds: float, num_tokens: int, *, is_plain: bool, plain_seconds: float = 0.0
    ) -> None:
        """Settle for a step of `seconds`, and `drafted_seconds` after it for the next window.

        `plain_seconds` are what a plain step would have taken just then; lately, where nobody knows.
        """
        self.count(num_tokens)
        known = self._known
        speed = known.plain_tokens / plain_seconds if plain_seconds else known.plain_speed
        if is_plain:
            self.credit -= drafted_seconds * speed
            self._put_aside(num_tokens)
        else:
            gain = num_tokens - (seconds + drafted_seconds) * speed
            self._kept = min(max(self._kept + gain, 0.0), _BY.most_kept)
            self.credit += gain
        self.credit = min(self.credit, self._most_credit + self._kept)
        self.is_resting = self.credit < (_BY.resumes if self.is_resting else 0.0)
        if is_plain:
            self._known.observe_plain(seconds, num_tokens)
