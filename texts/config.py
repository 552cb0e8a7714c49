"""What a caller may ask for: `GenerationConfig` (the text), `SpeculationConfig` (the speed), `CancelToken` (an end)."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, NamedTuple, Self, TypedDict

from mirrorsd.device_maps.card import ALLOCATIONS, ROOT_SOURCES, WINDOWS
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import Cancelled, ConfigError
from mirrorsd.graphs.names import METHODS, Method
from mirrorsd.texts.setting_rules import (
    Rule,
    apply_rules,
    number,
    of_type,
    one_of,
    or_unset,
    read_biases,
    read_mapping,
    read_mappings,
    read_schema,
    read_string,
    read_whole,
    require,
    several,
    shown,
    whole,
    yes_or_no,
)

HEAD_METHODS = names.HEAD_KINDS
"""Those that need a head of that kind in the bundle."""
LEAST_TEMPERATURE = 1e-3
_SAMPLED: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""What matters where a text is sampled, and the values that change nothing."""
_SEED_BITS = 32
"""Of a seed that is drawn: short enough to be typed again."""
CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Fields of which one may say what form the text has."""
_PENALTY = number(lambda penalty: -2 <= penalty <= 2, "-2 to 2")
_STRING = "a string that is not empty"


class CancelToken:
    """Stops every request that was given it (`GenerationConfig.cancel`), from any thread, within one step of each."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop them: each raises `Cancelled`, and so does one that is given this token later."""
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise `Cancelled` once `cancel` was called."""
        if self.is_cancelled:
            raise Cancelled("Cancelled before the prompt was read.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a request's settings is stopped by the same token."""
        return self


_GENERATION_RULES = {
    "max_new_tokens": whole(1),
    "do_sample": or_unset(yes_or_no()),
    "temperature": or_unset(
        number(lambda t: t == 0 or LEAST_TEMPERATURE <= t <= 100, f"0 (greedy), or {LEAST_TEMPERATURE} to 100")
    ),
    "top_k": or_unset(whole(0, words="0 (all) or more")),
    "top_p": or_unset(number(lambda p: 0 < p <= 1, "above 0, up to 1")),
    "min_p": or_unset(number(lambda p: 0 <= p < 1, "0 up to, not including, 1")),
    "repetition_penalty": or_unset(number(lambda p: 0.01 <= p <= 100, "0.01 to 100")),
    "seed": or_unset(whole(0, 2**64 - 1, "0 to 2**64 - 1")),
    "stop_strings": several(str, read_string, f"{_STRING}, or several"),
    "stop_token_ids": several(Integral, read_whole, "an id, or several"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": Rule("token ids and numbers from -100 to 100, as {id: number}", read_biases),
    "logprobs": yes_or_no(),
    "top_logprobs": whole(0, 20),
    "skip_special_tokens": yes_or_no(),
    "json_schema": or_unset(Rule("a JSON schema: a mapping, True or False, or one as JSON text", read_schema)),
    "regex": or_unset(Rule(_STRING, read_string)),
    "grammar": or_unset(Rule(f"{_STRING}: a Lark grammar", read_string)),
    "tools": Rule("a list of mappings, as the chat template wants them", read_mappings),
    "template_variables": or_unset(Rule("a mapping of names to values", read_mapping)),
    "prediction": several(Integral, read_whole, "an id, or several"),
    "continue_from": several(Integral, read_whole, "an id, or several"),
    "deadline_s": or_unset(number(lambda seconds: 0 < seconds <= 86400, "above 0, up to 86400 seconds")),
    "cancel": or_unset(of_type(CancelToken, "a CancelToken")),
    "ignore_eos": yes_or_no(),
    "use_defaults": yes_or_no(),
    "method": one_of(METHODS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What text to produce. Names follow transformers and openvino_genai.

    What is left unset (None) is taken from the checkpoint's `generation_config.json`, which the bundle keeps, and where
    that says nothing does nothing. As in transformers, its temperature makes nobody sample without its `do_sample`.

    Attributes:
        max_new_tokens: most tokens to produce (end of sequence included).
        do_sample: sample with `seed`. Unset: if `temperature` is above 0; without one, as the checkpoint does.
        temperature: divides the logits, at least 0.001; 0 is greedy. Unset, sampling: the checkpoint's, or 1.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with at least this mass.
        min_p: keep tokens with at least this share of the best token's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the text.
        seed: same seed, same text, whichever method or draft; unset, one is drawn and told in the result.
        stop_strings: end before the first of these in the produced text; a string, or several.
        stop_token_ids: end after one of these ids.
        presence_penalty: taken from the logit of each token that the new text has.
        frequency_penalty: the same, for each time that the new text has it.
        logit_bias: what is added to the logits of these ids; kept as pairs of id and number.
        logprobs: tell the log-probability that the target gave each chosen token, before all of the above.
        top_logprobs: tell those of so many likeliest tokens too.
        skip_special_tokens: leave special tokens out of the text. Otherwise they count in `stop_strings` too.
        json_schema: the text is JSON of this schema; kept as JSON text. Needs the package llguidance.
        regex: the text is one that this regular expression matches as a whole. Needs llguidance.
        grammar: the text is one of this Lark grammar, in llguidance's dialect. Needs llguidance.
        tools: what the chat template is told of the tools that the model may call; with `messages` only.
        template_variables: further variables of the chat template, such as `enable_thinking`; with `messages` only.
        prediction: ids of a text that the new one will probably repeat in parts: `auto` looks windows up in it.
        continue_from: ids that an earlier run of this very request gave, with its seed: they are verified, some thirty
            at a time, and the text goes on behind them as that run would have.
        deadline_s: seconds after which the text ends where it is, from the prompt's being tokens.
        cancel: a token that stops the request; one may stop several.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        use_defaults: whether the checkpoint's defaults are taken.
        method: `mirror`, `serial`, `plain`, `auto`, `lookup`, or the kind of a head that the bundle has (`medusa`,
            `hydra`, `eagle3`, `block`, `streaming`, `mtp`). Never changes the text.
    """

    max_new_tokens: int = 256
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] | None = None
    prediction: Sequence[int] = ()
    continue_from: Sequence[int] = ()
    deadline_s: float | None = None
    cancel: CancelToken | None = None
    ignore_eos: bool = False
    use_defaults: bool = True
    method: Method = "auto"

    def __post_init__(self) -> None:
        apply_rules(self, _GENERATION_RULES)
        contradicts = self.do_sample is True and self.temperature == 0
        self._require(not contradicts, "temperature", "above 0 when do_sample=True")
        self._require(self.logprobs or not self.top_logprobs, "top_logprobs", "0, or logprobs=True beside it")
        self._check_continuation()
        forms = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if forms:
            self._require(len(forms) == 1, forms[-1], f"None beside {forms[0]}, as a text has one form")
            self._require(not self.ignore_eos, "ignore_eos", f"False beside {forms[0]}, which says where the text ends")

    def _check_continuation(self) -> None:
        found, most = len(self.continue_from), self.max_new_tokens
        if found > most:
            raise ConfigError(
                f"{type(self).__name__}.continue_from has {found} ids; allowed: at most {most}, as max_new_tokens says."
            )

    def _require(self, is_fine: bool, field: str, allowed: str) -> None:
        require(is_fine, type(self).__name__, field, getattr(self, field), allowed)

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are sampled; otherwise decoding is greedy. Certain only once it is resolved."""
        if self.do_sample is not None:
            return self.do_sample
        return self.temperature is not None and self.temperature > 0

    @property
    def biases(self) -> dict[int, float]:
        """What is added to logits, by token."""
        return dict(self.logit_bias)

    def with_overrides(self, overrides: dict[str, Any]) -> Self:
        """A copy with some fields replaced.

        Raises:
            ConfigError: unknown field, or a value out of its range.
        """
        unknown = sorted(set(overrides) - set(self.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"GenerationConfig has no field {unknown[0]!r}; it has {', '.join(self.__slots__)}.")
        return replace(self, **overrides)

    def resolve(self, bundle_defaults: Mapping[str, Any] | None = None) -> Self:
        """A copy that leaves nothing open: the bundle's defaults taken, greedy or sampled decided, a seed drawn.

        Resolving a resolved one changes nothing.

        Args:
            bundle_defaults: what the checkpoint's `generation_config.json` says (`Manifest.generation`).

        Raises:
            ConfigError: a default that is not allowed, or a sampling option (`top_k`, `top_p`, `min_p`, `seed`) while
                nothing says that the text is sampled.
        """
        defaults = dict(bundle_defaults or {}) if self.use_defaults else {}
        penalty = self.repetition_penalty or defaults.get("repetition_penalty") or 1.0
        is_decided = self.do_sample is not None or self.temperature is not None
        if self.is_sampling or (not is_decided and defaults.get("do_sample")):
            open_ones = [name for name in _SAMPLED if getattr(self, name) is None]
            taken = {name: _SAMPLED[name] if defaults.get(name) is None else defaults[name] for name in open_ones}
            taken["seed"] = secrets.randbits(_SEED_BITS) if self.seed is None else self.seed
            return self._filled(do_sample=True, repetition_penalty=penalty, **taken)
        if not is_decided:
            self._refuse_sampling_options()
        nothing = {**_SAMPLED, "temperature": 0.0, "seed": None}
        return self._filled(do_sample=False, repetition_penalty=penalty, **nothing)

    def _refuse_sampling_options(self) -> None:
        for name in ("top_k", "top_p", "min_p", "seed"):
            value = getattr(self, name)
            if value is not None and value != _SAMPLED.get(name):
                raise ConfigError(
                    f"{type(self).__name__}.{name} is {shown(value)}, but this text is not sampled: give a temperature "
                    "too (1.0 is the model's own distribution), or leave it away; temperature=0 takes the best token."
                )

    def _filled(self, **values: Any) -> Self:
        try:
            return replace(self, **values)
        except ConfigError as error:
            raise ConfigError(
                f"The checkpoint's own default cannot be taken: {error} Give that field, or use_defaults=False."
            ) from error


class GenerationOptions(TypedDict, total=False):
    """The fields of `GenerationConfig` as keyword arguments: an editor completes them, a type checker checks them."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]]
    template_variables: Mapping[str, Any] | None
    prediction: Sequence[int]
    continue_from: Sequence[int]
    deadline_s: float | None
    cancel: CancelToken | None
    ignore_eos: bool
    use_defaults: bool
    method: Method


def resolve_generation(
    config: GenerationConfig | None, overrides: dict[str, Any], bundle_defaults: Mapping[str, Any]
) -> GenerationConfig:
    """What to generate by: the config with its overrides, the bundle's defaults where it leaves a field open.

    Raises:
        ConfigError: something else than a config, an unknown field, or what a field does not allow.
    """
    if not isinstance(config, GenerationConfig | None):
        raise ConfigError(
            f"config is of type {type(config).__name__}; allowed: a GenerationConfig, or its fields by name."
        )
    return (config or GenerationConfig()).with_overrides(overrides).resolve(bundle_defaults)


def _read_exits(value: object) -> object:
    if value is None:
        raise ValueError
    return value if isinstance(value, str) and value == "all" else several(Integral, read_whole, "").read(value)


LONGEST_WINDOW = 31
"""Most tokens of a window: with the head's, what `tune` measures passes of."""
_SPECULATION_RULES = {
    "gamma": whole(1, LONGEST_WINDOW),
    "siblings": whole(0, 24),
    "roots": whole(0, 128),
    "kappa": whole(1, 16),
    "root_source": one_of(ROOT_SOURCES),
    "allocation": one_of(ALLOCATIONS),
    "passes": whole(1, 32),
    "window": one_of(WINDOWS),
    "pad_rows_to": whole(0, words="0, or more than gamma"),
    "prefill_rows": whole(1, 4096),
    "exits": Rule('"all", a layer, or several; () for none', _read_exits),
    "repeats": yes_or_no(),
    "draft_deadline_s": number(lambda seconds: 0 < seconds <= 3600, "above 0, up to 3600 seconds"),
    "target_deadline_s": number(lambda seconds: 0 < seconds <= 3600, "above 0, up to 3600 seconds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How to be fast. Nothing here changes a token.

    Attributes:
        gamma: most draft tokens in a window.
        siblings: most other tokens beside a window, so that a pass checks a tree, on devices where rows are free.
        roots: branches to prepare while the target works (`global` allocation).
        kappa: branches per row (`per_row` allocation; the paper uses 8).
        root_source: `early` starts from the draft's own runners-up and asks no exit, `proxy` waits for the exit's
            guesses (the paper), `progressive` starts early and is corrected by the exit.
        allocation: `global` spends `roots` where they are likeliest, `per_row` spends `kappa` at every row.
        passes: most draft passes for a fresh window (`J`); a draft without streams always takes up to `gamma`.
        window: `full` verifies all that the draft has prepared; `worthwhile` only what is likely enough for its rows'
            time, and drafts on only while that pays, where the target's times are known (paced or tuned).
        pad_rows_to: run every target pass with exactly this many rows; 0 runs what is needed. With equal row counts
            the arithmetic of all methods is the same to the last bit (docs/exactness.md).
        exits: which of a bundle's exits are run, by layer, where it has several; the others cost nothing.
        prefill_rows: rows per prefill chunk.
        repeats: whether guesses lean on what the text has said before, the draft's as well; `lookup` is nothing else.
        draft_deadline_s: a draft of which one job takes longer than this is given up.
        target_deadline_s: a pass of the target that takes longer than this is ended with a `DeviceError`.
    """

    gamma: int = 6
    siblings: int = 0
    roots: int = 8
    kappa: int = 8
    root_source: str = "early"
    allocation: str = "global"
    passes: int = 2
    window: str = "worthwhile"
    pad_rows_to: int = 0
    exits: Literal["all"] | tuple[int, ...] = "all"
    prefill_rows: int = 128
    repeats: bool = True
    draft_deadline_s: float = 10.0
    target_deadline_s: float = 120.0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        apply_rules(self, _SPECULATION_RULES)
        is_padding = self.pad_rows_to == 0 or self.pad_rows_to > self.gamma
        require(is_padding, owner, "pad_rows_to", self.pad_rows_to, _SPECULATION_RULES["pad_rows_to"].allowed)
        is_tree = not (self.siblings and self.pad_rows_to)
        require(is_tree, owner, "siblings", self.siblings, "0 where pad_rows_to asks for passes of equal rows")
        needs_exit = self.root_source == "proxy" and not self.exits
        require(not needs_exit, owner, "exits", self.exits, 'at least one layer, as root_source is "proxy"')
        is_unheard = self.root_source == "early" and self.exits not in ("all", ())
        allowed = 'left out, "all" or none, as root_source "early" asks no exit ("progressive" and "proxy" do)'
        require(not is_unheard, owner, "exits", self.exits, allowed)


class Speculations(NamedTuple):
    """How greedy and how sampled texts are speculated: a draft agrees with sampled ones less often."""

    greedy: SpeculationConfig
    sampled: SpeculationConfig

    def of(self, config: GenerationConfig) -> SpeculationConfig:
        """The one for such a text."""
        return self.sampled if config.is_sampling else self.greedy
