"""What is known about a pair of models on their devices: by measurements, and by what texts have taught.

With it go the weights by which roots are judged (`roots` has the models). Wrong ones cost speed, never a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from mirrorsd.device_maps.pace import Curve, interpolate
from mirrorsd.runtime.config import SpeculationConfig
from mirrorsd.runtime.policy.account import PairKnowledge
from mirrorsd.runtime.policy.windows import LearnedLengths, WindowLength

_KNOWN = ("draft", "exit", "both")
NUM_ROW_FEATURES, NUM_TOKEN_FEATURES = 7, 4


class RootWeights(NamedTuple):
    """Weights of one state of knowledge.

    `accept` weighs the row features (see `roots.row_features`), `correction` and `bonus` the token features (see
    `roots.Candidates`): a correction is the token after a failed row, the bonus the one after a window that was right.
    """

    accept: tuple[float, ...]
    correction: tuple[float, ...]
    bonus: tuple[float, ...]


# Between plain probabilities (all 1) and what was fitted to the sample pair, where greedy choices proved surer than the
# shares say: another pair starts here until `mirrorsd tune` has seen it.
_BY_DRAFT = RootWeights((0.5, 2.0, 0.0, -0.8, 0.0, -0.5, 0.9), (2.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0))
_BY_EXIT = RootWeights((0.2, 0.0, 1.5, 0.0, -1.2, -0.5, 0.9), (0.0, 2.2, 0.0, 0.0), (0.0, 2.5, 0.0, 0.0))
_BY_BOTH = RootWeights((0.2, 1.5, 0.8, -0.3, -1.2, -0.5, 0.9), (0.8, 1.6, 0.0, 0.0), (0.9, 1.8, 0.0, 0.0))
DEFAULTS = {"draft": _BY_DRAFT, "exit": _BY_EXIT, "both": _BY_BOTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class RootScores:
    """The weights of a pair, by what is known: `draft`, `exit` or `both` (see `key`).

    Attributes:
        fitted: weights that were fitted, such as `{"draft": ..., "both:3:sampled": ...}`; the defaults serve the rest.
    """

    fitted: Mapping[str, RootWeights] = field(default_factory=dict)

    def weights(self, known: str, layer: int, *, is_sampling: bool) -> RootWeights:
        """The weights for one state of knowledge."""
        return self.fitted.get(key(known, layer, is_sampling=is_sampling)) or DEFAULTS[known]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {name: [[round(value, 4) for value in part] for part in parts] for name, parts in self.fitted.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave.

        Raises:
            ValueError: other names, or other numbers of weights.
        """
        sizes = [NUM_ROW_FEATURES, NUM_TOKEN_FEATURES, NUM_TOKEN_FEATURES]
        for name, parts in values.items():
            if name.split(":")[0] not in _KNOWN or [len(part) for part in parts] != sizes:
                raise ValueError(f"root scores {name!r} have other weights than {sizes}")
        return cls(fitted={name: RootWeights(*(tuple(map(float, p)) for p in parts)) for name, parts in values.items()})


def key(known: str, layer: int, *, is_sampling: bool) -> str:
    """The name of one state of knowledge; the draft alone has no depth.

    >>> key("draft", 0, is_sampling=False), key("both", 3, is_sampling=True)
    ('draft', 'both:3:sampled')
    """
    parts = [known] if known == "draft" else [known, str(layer)]
    return ":".join([*parts, "sampled"] if is_sampling else parts)


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
