"""What a caller may ask for: `GenerationConfig` (the text) and `SpeculationConfig` (the speed)."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from mirrorsd.device_maps.card import ALLOCATIONS, ROOT_SOURCES, WINDOWS
from mirrorsd.graphs.errors import ConfigError

Method = Literal["mirror", "serial", "plain", "auto"]
METHODS: tuple[Method, ...] = ("mirror", "serial", "plain", "auto")


def require(is_fine: bool, owner: str, field: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names the field, the value found and the range allowed, unless `is_fine`."""
    if not is_fine:
        raise ConfigError(f"{owner}.{field} is {value!r}; allowed: {allowed}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What text to produce. Names follow transformers and openvino_genai.

    Attributes:
        max_new_tokens: most tokens to produce (end of sequence included).
        do_sample: sample with `seed`; None means: sample if `temperature` was given and is above 0.
        temperature: divides the logits; None means 1 when sampling.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with at least this mass.
        min_p: keep tokens with at least this share of the best token's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the text.
        seed: same seed, same text, whichever method or draft; None means 0.
        stop_strings: end before the first of these in the produced text.
        stop_token_ids: end after one of these ids.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        method: `mirror`, `serial`, `plain` or `auto`. Never changes the text.
    """

    max_new_tokens: int = 256
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    method: Method = "auto"

    def __post_init__(self) -> None:
        owner = "GenerationConfig"
        require(self.max_new_tokens >= 1, owner, "max_new_tokens", self.max_new_tokens, "1 or more")
        is_temperature = self.temperature is None or 0 <= self.temperature <= 100
        require(is_temperature, owner, "temperature", self.temperature, "0 to 100")
        require(self.top_k >= 0, owner, "top_k", self.top_k, "0 (all) or more")
        require(0 < self.top_p <= 1, owner, "top_p", self.top_p, "above 0, up to 1")
        require(0 <= self.min_p < 1, owner, "min_p", self.min_p, "0 up to, not including, 1")
        require(self.repetition_penalty > 0, owner, "repetition_penalty", self.repetition_penalty, "above 0")
        is_seed = self.seed is None or 0 <= self.seed < 2**64
        require(is_seed, owner, "seed", self.seed, "0 to 2**64 - 1")
        require(self.method in METHODS, owner, "method", self.method, ", ".join(METHODS))
        require(all(self.stop_strings), owner, "stop_strings", self.stop_strings, "strings that are not empty")
        contradicts = self.do_sample is True and self.temperature == 0
        require(not contradicts, owner, "temperature", self.temperature, "above 0 when do_sample=True")

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are sampled; otherwise decoding is greedy."""
        if self.do_sample is not None:
            return self.do_sample
        return self.temperature is not None and self.temperature > 0

    def with_overrides(self, overrides: dict[str, Any]) -> Self:
        """A copy with some fields replaced.

        Raises:
            ConfigError: unknown field, or a value out of its range.
        """
        unknown = sorted(set(overrides) - set(self.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"GenerationConfig has no field {unknown[0]!r}; it has {', '.join(self.__slots__)}.")
        for name in ("stop_strings", "stop_token_ids"):
            if name in overrides:
                overrides = {**overrides, name: tuple(overrides[name])}
        return replace(self, **overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How to be fast. Nothing here changes a token.

    Attributes:
        gamma: most draft tokens in a window.
        roots: branches to prepare while the target works (`global` allocation).
        kappa: branches per row (`per_row` allocation; the paper uses 8).
        root_source: `proxy` waits for the exit's guesses (the paper), `early` starts from the draft's own runners-up,
            `progressive` starts early and is corrected by the exit.
        allocation: `global` spends `roots` where they are likeliest, `per_row` spends `kappa` at every row.
        passes: most draft passes for a fresh window (`J`); a draft without streams always takes up to `gamma`.
        window: `full` verifies all that the draft has prepared; `worthwhile` only what is likely enough for its rows'
            time, and drafts on only while that pays, where the target's times are known (paced or tuned).
        pad_rows_to: run every target pass with exactly this many rows; 0 runs what is needed. With equal row counts
            the arithmetic of all methods is the same to the last bit (ALGORITHM.md, "Exactness", 3).
        exits: which of a bundle's exits are run, by layer, where it has several; the others cost nothing.
        prefill_rows: rows per prefill chunk.
        draft_deadline_s: a draft of which one job takes longer than this is given up.
        target_deadline_s: a pass of the target that takes longer than this is ended with a `DeviceError`.
    """

    gamma: int = 6
    roots: int = 8
    kappa: int = 8
    root_source: str = "progressive"
    allocation: str = "global"
    passes: int = 2
    window: str = "worthwhile"
    pad_rows_to: int = 0
    exits: Literal["all"] | tuple[int, ...] = "all"
    prefill_rows: int = 128
    draft_deadline_s: float = 10.0
    target_deadline_s: float = 120.0

    def __post_init__(self) -> None:
        owner = "SpeculationConfig"
        require(1 <= self.gamma <= 31, owner, "gamma", self.gamma, "1 to 31")
        require(0 <= self.roots <= 128, owner, "roots", self.roots, "0 to 128")
        require(1 <= self.kappa <= 16, owner, "kappa", self.kappa, "1 to 16")
        require(self.allocation in ALLOCATIONS, owner, "allocation", self.allocation, ", ".join(ALLOCATIONS))
        require(1 <= self.passes <= 32, owner, "passes", self.passes, "1 to 32")
        require(self.window in WINDOWS, owner, "window", self.window, ", ".join(WINDOWS))
        require(self.root_source in ROOT_SOURCES, owner, "root_source", self.root_source, ", ".join(ROOT_SOURCES))
        is_padding = self.pad_rows_to == 0 or self.pad_rows_to > self.gamma
        require(is_padding, owner, "pad_rows_to", self.pad_rows_to, "0, or more than gamma")
        needs_exit = self.root_source == "proxy" and not self.exits
        require(not needs_exit, owner, "exits", self.exits, 'at least one layer, as root_source is "proxy"')
        require(1 <= self.prefill_rows <= 4096, owner, "prefill_rows", self.prefill_rows, "1 to 4096")
        require(self.draft_deadline_s > 0, owner, "draft_deadline_s", self.draft_deadline_s, "above 0 seconds")
        require(self.target_deadline_s > 0, owner, "target_deadline_s", self.target_deadline_s, "above 0 seconds")


class Speculations(NamedTuple):
    """How greedy and how sampled texts are speculated: a draft agrees with sampled ones less often."""

    greedy: SpeculationConfig
    sampled: SpeculationConfig

    def of(self, config: GenerationConfig) -> SpeculationConfig:
        """The one for such a text."""
        return self.sampled if config.is_sampling else self.greedy
