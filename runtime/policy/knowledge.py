"""What is known about a pair of models on their devices, by measurements, and by what texts have taught."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.graphs.draft_windows import GAMMA
from mirrorsd.runtime.policy.account import Account, PairKnowledge, SourceKnowledge
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.policy.windows import LearnedLengths, WindowLength
from mirrorsd.texts.config import SpeculationConfig


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What is known about a pair of models on their devices, and what texts have taught about it.

    Attributes:
        root_scores: how likely roots are, for this pair.
        target_ms: what the target's pass takes, by rows; empty while nobody knows.
        lengths: what texts have taught about windows, by whether they are sampled.
        lengths_of_heads: the same of windows that a head guesses, by its kind too.
        pairs: what texts have taught about drafting at all, by whether they are sampled.
        is_tuned: whether `tune` has found the settings for them.
        measure_again: takes the target's times once more, as long as nobody waits; None where these are not measured.
    """

    root_scores: RootScores = field(default_factory=RootScores)
    target_ms: Curve = ()
    lengths: dict[bool, LearnedLengths] = field(
        default_factory=lambda: {False: LearnedLengths(), True: LearnedLengths()}
    )
    lengths_of_heads: dict[tuple[str, bool], LearnedLengths] = field(default_factory=dict)
    pairs: dict[bool, PairKnowledge] = field(default_factory=lambda: {False: PairKnowledge(), True: PairKnowledge()})
    is_tuned: bool = False
    measure_again: Callable[["Knowledge"], None] | None = None
    _num_without: int = 0

    def text_ended(self, num_windows: int | None) -> None:
        """A text is over for which so many windows were verified; None: it wanted none.

        Where there were none, other programs may have disturbed the passes when they were measured. So that is done
        again behind the first such text, the second, the fourth and so on.
        """
        self._num_without += num_windows == 0
        if num_windows == 0 and self.measure_again is not None and self._num_without.bit_count() == 1:
            self.measure_again(self)

    @property
    def row_share(self) -> float:
        """Of a pass of one row, what a row of a window takes more; 0 while nobody knows."""
        if not self.target_ms:
            return 0.0
        first, last = interpolate(self.target_ms, 1), interpolate(self.target_ms, 1 + GAMMA)
        return max(last / max(first, 1e-9) - 1.0, 0.0) / GAMMA

    @property
    def does_drafting_pay(self) -> bool:
        """Whether windows of the draft are known to be worth more than the target's waiting: settings count then."""
        accounts = [(Account(pair), pair.plain_speed) for pair in self.pairs.values() if pair.is_plain_known]
        return any(account.worth_of_drafting(speed, is_ready=False) > 0 for account, speed in accounts)

    def windows(self, speculation: SpeculationConfig, *, is_sampling: bool, head: str = "") -> WindowLength | None:
        """What cuts the windows of a request, if it wants that and the target's times are known.

        They are the draft's windows, or those of a `head` of that kind.
        """
        if not self.target_ms or speculation.window == "full":
            return None
        padded = speculation.pad_rows_to
        target_ms = ((1.0, interpolate(self.target_ms, padded)),) if padded else self.target_ms
        weights = self.root_scores.weights("draft", 0, is_sampling=is_sampling)
        learned = self.head(head, is_sampling=is_sampling)[1] if head else self.lengths[is_sampling]
        return WindowLength(target_ms, weights.accept, learned)

    def head(self, kind: str, *, is_sampling: bool) -> tuple[SourceKnowledge, LearnedLengths]:
        """What texts have taught about a head and its windows."""
        source = self.pairs[is_sampling].heads.setdefault(kind, SourceKnowledge())
        return source, self.lengths_of_heads.setdefault((kind, is_sampling), LearnedLengths())
