"""`mirrorsd simulate`: replay recorded texts on any pace, with the runtime's own scheduler, in seconds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, read_questions
from mirrorsd.cli.input.requests import check_writable, first_turns
from mirrorsd.cli.output.console import add_row, note, print_json, print_table, progress
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.device_maps import Pace
    from mirrorsd.runtime.reporting.stats import GenerationStats
    from mirrorsd.runtime.tuning.recording import Recording

_FIGURES = ("tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")


def simulate(
    source: Annotated[
        Path, typer.Argument(help="A recording (.npz), or a bundle to record first.", show_default=False)
    ],
    device_map: Annotated[
        str, typer.Option("--device-map", help="A card with a [pace] table, to replay on.")
    ] = "paced-laptop",
    record: Annotated[Path | None, typer.Option(help="Keep the recording of a bundle here (.npz).")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Questions to record, in Spec-Bench's form.")] = None,
    methods: options.Methods = options.ALL_METHODS,
    max_new_tokens: options.MaxNewTokens = 96,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Replay recorded texts on the pace of a card: what a machine of those speeds would do with this pair."""
    check_writable("--record", record)
    from mirrorsd.device_maps import load_device_map
    from mirrorsd.runtime.engine import resolve_speculation
    from mirrorsd.runtime.loading import speculation_of
    from mirrorsd.runtime.tuning.recording import Recording
    from mirrorsd.runtime.tuning.simulation import Scenario
    from mirrorsd.runtime.tuning.simulation import simulate as replay

    card = load_device_map(device_map)
    if card.pace is None:
        raise ConfigError(f"The card {card.name} has no [pace] to replay on; name one that has, such as paced-laptop.")
    wanted = options.read_settings(settings)
    exits = wanted.pop("exits", None)
    speculation = resolve_speculation(speculation_of(card), wanted)
    if source.is_dir():
        recording = _record(source, prompts, record, _text_settings(max_new_tokens, temperature, seed))
    else:
        recording = Recording.read(source)
    names = options.read_methods(methods)
    layers = _layers(exits, recording)
    found: dict[str, list[GenerationStats]] = {}
    for name in names:
        scenario = Scenario(method=name, pace=card.pace, speculation=speculation, layers=layers)
        found[name] = replay(recording, scenario)
    _report(card.name, card.pace, found, as_json=as_json)


def _text_settings(max_new_tokens: int, temperature: float | None, seed: int | None) -> Any:
    from mirrorsd import GenerationConfig

    return GenerationConfig(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def _record(bundle: Path, prompts: Path | None, record: Path | None, config: Any) -> "Recording":
    """Record with whatever this machine has; the pace is applied when replaying."""
    from mirrorsd import MirrorPipeline
    from mirrorsd.runtime.tuning.recorder import record_texts

    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = first_turns(bundle, questions)
    with MirrorPipeline.load(bundle) as pipe, progress("recording", len(texts)) as advance:
        recording = record_texts(pipe, texts, config, advance=advance)
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


def _report(card: str, pace: "Pace", found: dict[str, list["GenerationStats"]], *, as_json: bool) -> None:
    from mirrorsd.runtime.tuning.simulation import mean_of, tokens_per_second

    rows: list[dict[str, Any]] = []
    for name, stats in found.items():
        figures = {figure: round(mean_of(stats, figure), 4) for figure in _FIGURES}
        rows.append({"method": name, "tokens_per_second": round(tokens_per_second(stats), 2), **figures})
    if as_json:
        print_json({"device_map": card, "simulated": True, "num_texts": len(next(iter(found.values()))), "rows": rows})
        return
    table = Table("method", "tokens/s", *(figure.replace("_", " ") for figure in _FIGURES))
    for row in rows:
        cells = [f"{row[figure]:.2f}" for figure in _FIGURES]
        add_row(table, row["method"], f"{row['tokens_per_second']:.1f}", *cells)
    print_table(table)
    print(
        f"SIMULATED: the times are those of the card {card} (one row takes {pace.target_ms[0][1]:g} ms), not measured"
    )
