"""What is known about a pair of models on their devices: by measurements, and by what texts have taught."""

from dataclasses import dataclass, field

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.runtime.config import SpeculationConfig
from mirrorsd.runtime.policy.account import PairKnowledge
from mirrorsd.runtime.policy.root_scores import RootScores
from mirrorsd.runtime.policy.windows import LearnedLengths, WindowLength


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What is known about a pair of models on their devices, and what texts have taught about it.

    Attributes:
        root_scores: how likely roots are, for this pair.
        target_ms: what the target's pass takes, by rows; empty while nobody knows.
        lengths: what texts have taught about windows, by whether they are sampled.
        lengths_of_heads: the same of windows that a head guesses, by its kind too.
        pairs: what texts have taught about drafting at all, by whether they are sampled.
    """

    root_scores: RootScores = field(default_factory=RootScores)
    target_ms: Curve = ()
    lengths: dict[bool, LearnedLengths] = field(
        default_factory=lambda: {False: LearnedLengths(), True: LearnedLengths()}
    )
    lengths_of_heads: dict[tuple[str, bool], LearnedLengths] = field(default_factory=dict)
    pairs: dict[bool, PairKnowledge] = field(default_factory=lambda: {False: PairKnowledge(), True: PairKnowledge()})

    def windows(self, speculation: SpeculationConfig, *, is_sampling: bool, head: str = "") -> WindowLength | None:
        """What cuts the windows of a request, if it wants that and the target's times are known.

        They are the draft's windows, or those of a `head` of that kind.
        """
        if not self.target_ms or speculation.window == "full":
            return None
        padded = speculation.pad_rows_to
        target_ms = ((1.0, interpolate(self.target_ms, padded)),) if padded else self.target_ms
        weights = self.root_scores.weights("draft", 0, is_sampling=is_sampling)
        learned = self.lengths[is_sampling]
        if head:
            learned = self.lengths_of_heads.setdefault((head, is_sampling), LearnedLengths())
        return WindowLength(target_ms, weights.accept, learned)
