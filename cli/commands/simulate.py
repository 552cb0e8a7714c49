"""`mirrorsd simulate`: replay recorded texts on any pace, with the runtime's own scheduler, in seconds."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mirrorsd.cli.commands.loading import fetched, first_turns
from mirrorsd.cli.input import options
from mirrorsd.cli.input.estimated_pace import estimated_pace, with_host_ms
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, read_questions
from mirrorsd.cli.input.requests import check_writable
from mirrorsd.cli.output.console import add_row, note, print_figures, print_json, progress
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.names import ESTIMATED, Method
from mirrorsd.hub.archives import ending_of

if TYPE_CHECKING:
    from mirrorsd.device_maps import DeviceMap, Pace
    from mirrorsd.machine.tuning.recording import Recording
    from mirrorsd.runtime.reporting.stats import GenerationStats

_FIGURES = ("tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")


def simulate(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="A recording (.npz), or a bundle to record first.", show_default=False)
    ],
    device_map: Annotated[
        str, typer.Option("--device-map", help="A card with a [pace] or an [estimate], to replay on.")
    ] = "paced-laptop",
    npu_report: Annotated[
        Path | None, typer.Option(help="Report of the NPU's compiler; the bundle's own without it.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help="GB of a target's pass, of an exit, layers: 4.5,0.3,36; the bundle's without it.")
    ] = None,
    host_ms: Annotated[
        float | None, typer.Option(help="The processor's part of a draft round; the card's without it.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Keep the recording of a bundle here (.npz).")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Questions to record, in Spec-Bench's form.")] = None,
    methods: options.Methods = options.DRAFT_METHODS,
    max_new_tokens: options.MaxNewTokens = 96,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay recorded texts on the pace of a card: what a machine of those speeds would do with this pair."""
    check_writable("--record", record)
    from mirrorsd.device_maps import load_device_map
    from mirrorsd.machine.tuning.recording import Recording
    from mirrorsd.machine.tuning.simulation import Scenario
    from mirrorsd.machine.tuning.simulation import simulate as replay
    from mirrorsd.texts.speculation import resolve_speculation, speculation_of

    card = load_device_map(device_map)
    names, wanted = options.read_methods(methods), options.read_settings(settings)
    exits = wanted.pop("exits", None)
    speculation = resolve_speculation(speculation_of(card), wanted)
    if card.pace is not None:
        options.refuse_beside(f"as {card.name} has a pace", context, "npu_report", "target_size", "host_ms")
    is_recording = source.is_file() and not ending_of(source.name)
    if is_recording:
        of_recording = ("record", "prompts", "max_new_tokens", "temperature", "seed")
        options.refuse_beside("with a recording, which has its texts", context, *of_recording)
    source = source if is_recording else fetched(source)

    def pace_for(longest: int) -> "Pace":
        return card.pace or estimated_pace(with_host_ms(card, host_ms), source, longest, npu_report, target_size)

    if source.is_dir():
        pace_for(longest=0)  # what is missing is said before anything is recorded
        recording = _record(source, prompts, record, names, _text_settings(max_new_tokens, temperature, seed))
    else:
        recording = Recording.read(source)
    pace = pace_for(max(len(text.tokens) for text in recording.texts))
    scenario = {"pace": pace, "speculation": speculation, "layers": _layers(exits, recording)}
    found: dict[str, list[GenerationStats]]
    found = {name: replay(recording, Scenario(method=name, **scenario)) for name in names}  # type: ignore[arg-type]
    _report(card, pace, found, as_json=as_json)


def _text_settings(max_new_tokens: int, temperature: float | None, seed: int | None) -> Any:
    from mirrorsd import GenerationConfig

    return GenerationConfig(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def _record(
    bundle: Path, prompts: Path | None, record: Path | None, methods: tuple[Method, ...], config: Any
) -> "Recording":
    """Record with whatever this machine has; the pace is applied when replaying."""
    from mirrorsd import MirrorPipeline
    from mirrorsd.machine.tuning.recorder import record_texts
    from mirrorsd.texts.config import HEAD_METHODS
    from mirrorsd.texts.speculation import check_head

    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = first_turns(bundle, questions)
    with MirrorPipeline.load(bundle) as pipe, progress("recording", len(texts)) as advance:
        heads = [kind for kind in HEAD_METHODS if kind in pipe.methods]
        for method in methods:
            check_head(method, pipe.manifest, heads)
        recording = record_texts(pipe, texts, config, heads=heads, advance=advance)
    if record is not None:
        recording.write(record)
        note(f"kept in {record}")
    return recording


def _layers(exits: object, recording: "Recording") -> tuple[int, ...] | None:
    if exits is None or exits == "all":
        return None
    assert isinstance(exits, tuple)
    missing = sorted(set(exits) - set(recording.layers))
    if missing:
        raise ConfigError(f"The recording has no exit after layer {missing[0]}; it has {recording.layers}.")
    return exits


def _report(card: "DeviceMap", pace: "Pace", found: dict[str, list["GenerationStats"]], *, as_json: bool) -> None:
    from mirrorsd.machine.tuning.simulation import mean_of, shares_of, tokens_per_second

    rows: list[dict[str, Any]] = []
    for name, stats in found.items():
        figures = {figure: round(mean_of(stats, figure), 4) for figure in _FIGURES}
        speed, sources = round(tokens_per_second(stats), 2), shares_of(stats, "reuse_by_source")
        rows.append({"method": name, "tokens_per_second": speed, **figures, "reuse_by_source": sources})
    if as_json:
        head = {"device_map": card.name, "simulated": True, "pace": asdict(pace)}
        note_of = {"note": ESTIMATED} if card.pace is None else {}
        print_json(head | note_of | {"num_texts": len(next(iter(found.values()))), "rows": rows})
        return
    table = Table("method", "tokens/s", *(figure.replace("_", " ") for figure in _FIGURES))
    for row in rows:
        cells = [f"{row[figure]:.2f}" for figure in _FIGURES]
        add_row(table, row["method"], f"{row['tokens_per_second']:.1f}", *cells)
    print_figures(table)
    rounds = ", ".join(f"{size:g} rows {ms:g} ms" for size, ms in pace.draft_ms)
    print(
        f"SIMULATED: the times are those of the card {card.name} (one row takes {pace.target_ms[0][1]:g} ms, a draft's "
        f"round {rounds}), not measured"
    )
    if card.pace is None:
        print(f"{ESTIMATED}; the target's times are the bytes that it reads over the GPU's bandwidth.")
