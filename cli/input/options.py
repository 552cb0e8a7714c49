"""Options that several sub-commands share, declared once."""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from mirrorsd.graphs.errors import ConfigError

MethodName = Literal["mirror", "serial", "plain", "auto"]

TEXT, SPEED = "Text", "Speed"

Bundle = Annotated[Path, typer.Argument(help="Folder made by `mirrorsd export`.", show_default=False)]
DeviceMapName = Annotated[str, typer.Option("--device-map", help="Built-in card, a .toml file, or auto.")]
Layout = Annotated[
    str | None,
    typer.Option(help="How target and draft share the processor: apart or shared.", rich_help_panel=SPEED),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]

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
    str, typer.Option(help="Sampling noise in the draft's graph: yes, no, auto (small vocabularies only).")
]

MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to produce.", rich_help_panel=TEXT)]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sample at this temperature; 0: greedy. Without it, what the checkpoint says, else greedy.",
        rich_help_panel=TEXT,
    ),
]
Greedy = Annotated[
    bool,
    typer.Option(
        "--greedy", help="Take the best token, and none of the checkpoint's own defaults.", rich_help_panel=TEXT
    ),
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

Gamma = Annotated[int | None, typer.Option(help="Most draft tokens in a window.", rich_help_panel=SPEED)]
Roots = Annotated[int | None, typer.Option(help="Branches prepared per step.", rich_help_panel=SPEED)]
RootSource = Annotated[
    str | None, typer.Option(help="Where branches come from: proxy, early or progressive.", rich_help_panel=SPEED)
]
Allocation = Annotated[str | None, typer.Option(help="global or per_row.", rich_help_panel=SPEED)]
Passes = Annotated[int | None, typer.Option(help="Most draft passes per window.", rich_help_panel=SPEED)]
Window = Annotated[
    str | None,
    typer.Option(help="worthwhile (as long as its rows' time is worth) or full.", rich_help_panel=SPEED),
]
Exits = Annotated[
    str | None,
    typer.Option(help="Which of the bundle's exits to run: all, none, or layers: 12,20.", rich_help_panel=SPEED),
]
PadRowsTo = Annotated[
    int | None,
    typer.Option(help="Run every target pass with this many rows: equal to the last bit.", rich_help_panel=SPEED),
]

METHODS = ("plain", "serial", "mirror", "auto")
Method = Annotated[str, typer.Option(help=f"{', '.join(METHODS)}.")]


def decoding(temperature: float | None, *, greedy: bool) -> dict[str, Any]:
    """The fields of `GenerationConfig` that `--temperature` and `--greedy` decide.

    Raises:
        ConfigError: both are given, and say different things.
    """
    if greedy and temperature:
        raise ConfigError(f"Both --greedy and --temperature {temperature:g} are given; give one of them.")
    return {"temperature": 0.0, "use_defaults": False} if greedy else {"temperature": temperature}


def read_exits(text: str | None) -> Literal["all"] | tuple[int, ...] | None:
    """Read `all`, `none`, `12` or `12,20`; None stays None.

    Raises:
        ConfigError: anything else.
    """
    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--exits is {text!r}; allowed: all, none, a layer, or several: 12,20.") from error


def checked_method(name: str) -> MethodName:
    """The method of that name.

    Raises:
        ConfigError: there is no such method.
    """
    if name not in METHODS:
        raise ConfigError(f"Unknown method {name!r}; allowed: {', '.join(METHODS)}.")
    return cast("MethodName", name)


def read_choice(option: str, answer: str) -> bool | None:
    """Read yes, no or auto (None).

    Raises:
        ConfigError: anything else.
    """
    choices = {"yes": True, "no": False, "auto": None}
    if answer not in choices:
        raise ConfigError(f"{option} is {answer!r}; allowed: {', '.join(choices)}.")
    return choices[answer]
