"""Options that several sub-commands share, declared once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mirrorsd.device_maps import builtin_names
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.names import HEAD_KINDS, METHODS
from mirrorsd.graphs.names import Method as MethodName

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig

TargetPrecision = Literal["fp32", "fp16", "bf16", "int8", "int4", "file"]
ComputeName = Literal["auto", "fp32", "fp16", "bf16"]
Compute = Annotated[
    ComputeName, typer.Option(help="What int8 and int4 compute in; auto is fp32, or fp16 where --device-map needs it.")
]
PartPrecision = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4"]
HeadPrecision = Annotated[PartPrecision, typer.Option(help="Its LM head; auto is int8 with integer weights.")]
EmbeddingPrecision = Annotated[PartPrecision, typer.Option(help="Its embedding; auto as for the head.")]
DraftPrecision = Literal["auto", "fp32", "fp16", "int8", "int4", "int8-rows", "int4-blocks"]
DraftWeights = Annotated[
    DraftPrecision,
    typer.Option(
        metavar="WEIGHTS",
        help="The draft's: fp32, fp16, int8, int4; for a processor alone int8-rows or int4-blocks; auto is int8-rows "
        "where --device-map has it on a processor, else fp32.",
    ),
]
ProductsName = Literal["auto", "integer", "blocks"]
Products = Annotated[
    ProductsName,
    typer.Option(help="int8: integer, for processors; blocks, for GPUs too; auto: what is faster here."),
]
Rounding = Annotated[Literal["nearest", "gptq"], typer.Option(help="gptq: fitted to the calibration text (int4).")]
YesNoAuto = Literal["yes", "no", "auto"]

TEXT, SPEED = "Text", "Speed (changes no token)"

_BUNDLE: Any = typer.Argument(
    help="Bundle: a folder, hf:OWNER/NAME[@REVISION], or an archive or its https address.", show_default=False
)
Bundle = Annotated[Path, _BUNDLE]
MaybeBundle = Annotated[Path | None, _BUNDLE]
"""References to bundles; a command begins with the folder that one stands for (`application`)."""
DeviceMapName = Annotated[
    str,
    typer.Option(
        "--device-map",
        help="Built-in card, a .toml file, or auto.",
        rich_help_panel=SPEED,
        autocompletion=lambda: ["auto", *builtin_names()],
    ),
]
Layout = Annotated[
    Literal["apart", "shared"] | None,
    typer.Option(help="How target and draft share the processor's cores.", rich_help_panel=SPEED),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Go on with the prompt as text; without it, the chat template is used if there is one."),
]
Questions = Annotated[
    Path | None, typer.Option("--prompts", help="Spec-Bench JSONL file; without it, a few built-in ones.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say what runs where, and why.")]
ShowAll = Annotated[bool, typer.Option("--all", help="Show also what does not fit, what is fine, and every version.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]

KEY_VARIABLE = "MIRRORSD_API_KEY"
"""The key with which clients ask a server, where no file has several."""
Host = Annotated[str, typer.Option(help="Address to listen on; others than this machine's own need a key.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help=f"File with a key on each line; without it ${KEY_VARIABLE} counts.")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="A further name (or name:port) by which clients reach this server."),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option("--allowed-origin", help="A site whose pages may use this server, like https://name:port."),
]
Grace = Annotated[float, typer.Option(help="Seconds that running answers get when the server stops.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")]
LOOPBACK, PORT, GRACE_S = "127.0.0.1", 8600, 10.0

DraftGroup = Annotated[int, typer.Option(help="int4: weights per scale: 32, 64, 128, or -1 for a whole row.")]
DraftDataAware = Annotated[bool, typer.Option("--draft-data-aware", help="int4: round by what the draft computes.")]
AllowDraftLoss = Annotated[
    bool, typer.Option("--allow-draft-loss", help="Keep a draft that loses over 3 % of its accepted length.")
]
AcceptError = Annotated[
    float | None,
    typer.Option(help="Accept stages that differ from PyTorch by so many standard deviations.", show_default=False),
]
Npu = Annotated[
    str | None,
    typer.Option(
        help="Compile for Intel NPUs that are not here: 3720, 4000, 5010, or meteor-lake, arrow-lake, lunar-lake, "
        "panther-lake, separated by commas.",
        show_default=False,
    ),
]
NpuCompilerCommand = Annotated[
    str | None,
    typer.Option(
        "--npu-compiler",
        help="Command that compiles: MODEL.xml BLOB PLATFORM KEY=VALUE...; without it OpenVINO's own.",
        show_default=False,
    ),
]
DraftNoise = Annotated[
    YesNoAuto, typer.Option(help="Sampling noise in the draft's graph; auto: for small vocabularies only.")
]

MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to produce.", rich_help_panel=TEXT)]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sample at this temperature; 0: greedy. Without it what the checkpoint says; else chats are sampled at "
        "0.8 or as their model's makers say, and all else is greedy.",
        rich_help_panel=TEXT,
    ),
]
Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="Take the best token, and no defaults.", rich_help_panel=TEXT),
]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens; 0 keeps all.", rich_help_panel=TEXT)]
TopP = Annotated[float | None, typer.Option(help="Keep the best tokens of this much mass.", rich_help_panel=TEXT)]
MinP = Annotated[
    float | None, typer.Option(help="Keep tokens of at least this share of the best one's.", rich_help_panel=TEXT)
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 weakens repetition.", rich_help_panel=TEXT)]
Seed = Annotated[
    int | None,
    typer.Option(help="Same seed, same text, by every method; drawn and told without it.", rich_help_panel=TEXT),
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.", rich_help_panel=TEXT)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of text.", rich_help_panel=TEXT)]

Method = Annotated[
    MethodName,
    typer.Option(
        metavar="METHOD",
        help=f"How to decode; auto runs what is cheapest. One of {', '.join(METHODS)}; the last {len(HEAD_KINDS)} "
        "need a head.",
        rich_help_panel=SPEED,
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        help=f"Which methods, separated by commas, of {', '.join(METHODS)}.", autocompletion=lambda: [*METHODS]
    ),
]
DRAFT_METHODS = "plain,serial,mirror,auto"
"""What every bundle has all parts for."""
_SPEED_SETTINGS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("gamma", "siblings", "passes", "roots", "kappa", "pad_rows_to", "prefill_rows"), int),
    **dict.fromkeys(("window", "root_source", "allocation"), str),
    "exits": lambda text: read_exits(text),
    "repeats": lambda text: read_yes_or_no(text),
}
"""What `-S` sets, and how its value is read; what is allowed is for `SpeculationConfig` to say."""
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "-S",
        "--set",
        metavar="NAME=VALUE",
        help=f"A rare setting, such as -S gamma=6; may be repeated. There are {', '.join(_SPEED_SETTINGS)}.",
        rich_help_panel=SPEED,
        autocompletion=lambda: [f"{name}=" for name in _SPEED_SETTINGS],
    ),
]
PadRowsTo = Annotated[
    int | None,
    typer.Option(help="Run every target pass with this many rows: equal to the last bit.", rich_help_panel=SPEED),
]


def read_settings(given: list[str] | None) -> dict[str, object]:
    """Fields of `SpeculationConfig` from `NAME=VALUE`; a name may be written with dashes.

    >>> read_settings(["gamma=6", "root-source=early", "exits=none"])
    {'gamma': 6, 'root_source': 'early', 'exits': ()}

    Raises:
        ConfigError: no such setting, no value, or a value of another kind.
    """
    found: dict[str, object] = {}
    for text in given or ():
        dashed, equals, value = text.partition("=")
        name = dashed.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"-S is {text!r}; expected NAME=VALUE, such as -S gamma=6.")
        if name not in _SPEED_SETTINGS:
            near = get_close_matches(name, _SPEED_SETTINGS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"There is no speed setting {name!r}{hint} There are {', '.join(_SPEED_SETTINGS)}.")
        try:
            found[name] = _SPEED_SETTINGS[name](value.strip())
        except ValueError as error:
            raise ConfigError(f"-S {name} is {value!r}; allowed: a whole number.") from error
    return found


def decoding(temperature: float | None, *, greedy: bool) -> dict[str, Any]:
    """The fields of `GenerationConfig` that `--temperature` and `--greedy` decide.

    Raises:
        ConfigError: both are given, and say different things.
    """
    if greedy and temperature:
        raise ConfigError(f"Both --greedy and --temperature {temperature:g} are given; give one of them.")
    return {"temperature": 0.0, "use_defaults": False} if greedy else {"temperature": temperature}


def text_config(asked: Mapping[str, Any], **limits: Any) -> "GenerationConfig":
    """What text to produce: `asked` are the options for the text by their parameters' names, `limits` other fields.

    Raises:
        ConfigError: a value out of its range, or options that contradict each other.
    """
    from mirrorsd import GenerationConfig

    fields = {name: value for name, value in asked.items() if name not in ("temperature", "greedy", "stop")}
    fields |= decoding(asked["temperature"], greedy=asked["greedy"])
    return GenerationConfig(stop_strings=tuple(asked["stop"] or ()), **fields, **limits)


def read_yes_or_no(text: str) -> bool:
    """Read `yes` or `no`.

    Raises:
        ConfigError: anything else.
    """
    if text not in ("yes", "no"):
        raise ConfigError(f"-S repeats is {text!r}; allowed: yes, no.")
    return text == "yes"


def read_exits(text: str) -> Literal["all"] | tuple[int, ...]:
    """Read `all`, `none`, `12` or `12,20`.

    Raises:
        ConfigError: anything else.
    """
    if text == "all":
        return "all"
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"-S exits is {text!r}; allowed: all, none, a layer, or several: 12,20.") from error


def checked_method(name: str) -> MethodName:
    """The method of that name.

    Raises:
        ConfigError: there is no such method.
    """
    for method in METHODS:
        if method == name:
            return method
    raise ConfigError(f"Unknown method {name!r}; allowed: {', '.join(METHODS)}.")


def read_methods(text: str) -> tuple[MethodName, ...]:
    """Split a list of methods.

    Raises:
        ConfigError: an unknown method, one named twice, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"--methods is {text!r}; allowed: different ones of {', '.join(METHODS)}.")
    return tuple(map(checked_method, names))


def read_choice(answer: YesNoAuto) -> bool | None:
    """True for yes, False for no, None for auto."""
    return {"yes": True, "no": False, "auto": None}[answer]


def refuse_without(needed: str, context: typer.Context, *parameters: str) -> None:
    """Refuse options that were typed and would do nothing without another one.

    Raises:
        ConfigError: there is one.
    """
    for option in _typed(context, parameters):
        raise ConfigError(f"{option} does nothing without {needed} here. Give that, too, or leave {option} out.")


def refuse_beside(other: str, context: typer.Context, *parameters: str) -> None:
    """Refuse options that were typed and would do nothing, as something else decides what they are about.

    Raises:
        ConfigError: there is one.
    """
    for option in _typed(context, parameters):
        raise ConfigError(f"{option} does nothing {other}: leave it out.")


def _typed(context: typer.Context, parameters: Sequence[str]) -> Iterator[str]:
    """Which of the options somebody has typed."""
    for parameter in parameters:
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE":
            yield next(one.opts[0] for one in context.command.params if one.name == parameter)
