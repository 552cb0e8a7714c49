"""`mirrorsd train exit`: coverage of every exit, low-rank adapters for some, coverage again."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mirrorsd.cli.commands.export import read_exit_layers
from mirrorsd.cli.commands.train import target as shared
from mirrorsd.cli.commands.train.draft import open_target_and_text
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, note, print_json, print_table, training_bar
from mirrorsd.graphs.errors import ConfigError


def exit_command(
    target: shared.Target,
    work: shared.Work,
    corpus: shared.Corpus = None,
    held_back: shared.HeldBack = None,
    texts: shared.Texts = 9000,
    document_share: shared.DocumentShare = 0.0,
    layers: Annotated[str, typer.Option(help="auto (from half depth on), a layer, or several: 3,4.")] = "auto",
    rank: Annotated[int, typer.Option(help="Rank of the adapters, 8 to 64 by custom.")] = 64,
    batch: shared.Batch = 6,
    length: shared.Length = 512,
    seconds: shared.Seconds = 240.0,
    resume: shared.Resume = False,
    threads: shared.Threads = 0,
    device: shared.Device = "auto",
    count_cpu: shared.CountCpu = False,
    deadline: shared.Deadline = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the target's exits, train adapters for them with the target frozen, and measure again.

    Writes exit_adapters.safetensors, exit_coverage.json and exit_coverage.png beside the target's weights; `export`
    carries them into the bundle. Seconds of 0 only measure.
    """
    from mirrorsd.training.exit_adapter import check_rank
    from mirrorsd.training.run.schedule import WarmStableDecay
    from mirrorsd.training.run.timed_run import RunConfig
    from mirrorsd.training.text.work_folder import training_text

    checkpoint = shared.open_target(target, trained=0, tokens=batch * length, threads=threads, device=device)
    chosen = chosen_layers(layers, int(checkpoint.config["num_hidden_layers"]))
    check_rank(rank, int(checkpoint.config["hidden_size"]))
    schedule = WarmStableDecay(budget_s=seconds, decay_s=seconds / 2)
    run_folder = work / "exits"
    shared.check_fresh(run_folder, resume=resume)
    source = shared.TextSource(corpus=corpus, held_back=held_back, count=texts)
    shared.check_text(work, source, (batch, length) if seconds else (0, 0), document_share, seconds, checkpoint)
    model, documents = open_target_and_text(checkpoint, source, work, document_share)
    if seconds:
        config = RunConfig(
            out=run_folder, schedule=schedule, deadline=deadline, save_every_s=60.0, counts_cpu=count_cpu
        )
        text = training_text([work], documents, document_share)
        _train(model, (checkpoint.folder, text), (chosen, rank), config, (batch, length))
    coverage = _measure(model, checkpoint.folder, work, chosen)
    if as_json:
        print_json({"target": str(target), **coverage})
        return
    _print_coverage(coverage)


def chosen_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Exit layers by option: `auto` takes half depth and everything behind it.

    Raises:
        ConfigError: not a list of layers, or a layer at which this target cannot be left.
    """
    chosen = read_exit_layers(text)
    if chosen == "auto":
        return tuple(range(max(1, num_layers // 2), num_layers))
    wrong = [layer for layer in chosen if not 1 <= layer < num_layers]
    if wrong:
        raise ConfigError(f"--layers names layer {wrong[0]}; this target can be left after 1..{num_layers - 1}")
    return chosen


def _train(
    model: Any, given: tuple[Path, Any], job: tuple[tuple[int, ...], int], config: Any, batch: tuple[int, int]
) -> None:
    from mirrorsd.training.exit_adapter import make_adapters, save_adapters, train_adapters
    from mirrorsd.training.run.loss_curve import plot_losses
    from mirrorsd.training.run.timed_run import LOSSES_FILE

    (target, text), (layers, rank) = given, job
    adapters = make_adapters(model.config.hidden_size, layers, rank)
    with training_bar("training exits") as show:
        train_adapters(model, adapters, text, config, batch=batch, show=show)
    save_adapters(target, adapters)
    if (config.out / LOSSES_FILE).is_file():
        plot_losses(config.out / LOSSES_FILE, config.out / "losses.png")


def _measure(model: Any, target: Path, work: Path, layers: tuple[int, ...]) -> dict[str, Any]:
    """Measure every border of the target, with the adapters that lie beside it."""
    from mirrorsd.graphs.names import EXIT_ADAPTERS_FILE
    from mirrorsd.training.exit_adapter import load_adapters
    from mirrorsd.training.reports.exit_coverage import measure_coverage, plot_coverage, write_coverage

    adapters = load_adapters(target) if (target / EXIT_ADAPTERS_FILE).is_file() else {}
    texts = shared.held_back_texts(work)
    note(f"measuring every exit on {len(texts)} held-back texts")
    borders = range(1, model.config.num_hidden_layers)
    everywhere = measure_coverage(model, {layer: adapters.get(layer) for layer in borders}, texts)
    plot_coverage(everywhere, target / "exit_coverage.png")
    by_layer = everywhere["layers"]
    coverage = {
        "positions": everywhere["positions"],
        "layers": {layer: kinds for layer, kinds in by_layer.items() if int(layer) in layers},
        "untrained_everywhere": {layer: kinds["untrained"] for layer, kinds in by_layer.items()},
    }
    text = f"{len(texts)} held-back prompts, continued greedily by the target, before loops begin"
    return write_coverage(target, coverage, text)


def _print_coverage(coverage: dict[str, Any]) -> None:
    table = Table("exit after layer", "exit", "top 1", "top 4", "top 8", "top 16")
    plain = {layer: {"untrained": shares} for layer, shares in coverage["untrained_everywhere"].items()}
    for layer, kinds in (plain | coverage["layers"]).items():
        for kind, shares in kinds.items():
            add_row(table, layer, kind, *(f"{share:.1%}" for share in shares.values()))
    print_table(table)
    print(f"the target's own choice is in the exit's top k; {coverage['positions']} positions")
