"""What each part of the scheduler brings: every table by the simulator, on every paced card, greedy and at T=1.

    python bench/studies/ablation.py storyteller.mirror --cache FOLDER --output ablation.json --plot ablation.png

The bundle should have several exits (`--exit-layer 3,4,5`); the first one is used where a table does not say. Texts are
recorded once and kept in FOLDER; root scores are fitted to other prompts than those replayed.
`bench/claims/simulator.py` says how far the simulator can be trusted.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.device_maps import load_device_map
from mirrorsd.runtime.loading import speculation_of
from mirrorsd.runtime.policy.root_scores import RootScores
from mirrorsd.runtime.tuning.recorder import record_texts
from mirrorsd.runtime.tuning.recording import Recording
from mirrorsd.runtime.tuning.score_fitting import fit_scores
from mirrorsd.runtime.tuning.simulation import Scenario, mean_of, simulate, tokens_per_second
from mirrorsd.training.plot_style import COLOURS, legend_outside, save

CARDS = ("paced-laptop", "paced-paper", "paced-slow-npu")
SOURCES = ("proxy", "early", "progressive")
BUDGETS = (4, 8, 16, 32)
COLUMNS = ("table", "setting", "tokens_per_second", "speed_up", "tokens_per_step", "reuse_rate", "draft_exposed_ms")


def main() -> None:
    """Record, replay all tables, print, draw and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the recordings")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        recording, scores = recorded(options, temperature)
        for card in CARDS:
            rows += [{"card": card, "temperature": temperature, **row} for row in tables(card, recording, scores)]
            print(f"\n{card}, T={temperature:g}")
            runs.print_rows([r for r in rows if (r["card"], r["temperature"]) == (card, temperature)], COLUMNS)
    report = runs.header(options.bundle, simulated=True, prompts=options.count, tokens=options.tokens)
    report |= {"ends": runs.ends(options), "rows": rows}
    runs.finish(report, options.output)
    if options.plot:
        draw(rows, options.plot)


def recorded(options: Any, temperature: float) -> tuple[Recording, RootScores]:
    """The texts to replay, and root scores fitted to others; kept in the cache folder."""
    options.cache.mkdir(exist_ok=True)
    config = runs.seeded(runs.text_config(options, temperature), 1)
    paths = {
        first: options.cache / f"{options.bundle.stem}-{temperature:g}-{runs.ends(options)}-from{first}.npz"
        for first in (0, 3)
    }
    if not all(path.exists() for path in paths.values()):
        with MirrorPipeline.load(options.bundle, device_map="cpu", use_tuned=False) as pipe:
            for first, path in paths.items():
                record_texts(pipe, runs.spread_prompts(options.prompts, options.count, first), config).write(path)
    recording, others = (Recording.read(path) for path in paths.values())
    return recording, fit_scores([others], gamma=7)


def tables(card_name: str, recording: Recording, scores: RootScores) -> Iterator[dict[str, Any]]:
    """Every row of one card: figures of a setting, and its speed over plain decoding."""
    card = load_device_map(card_name)
    assert card.pace is not None
    base = Scenario(pace=card.pace, speculation=speculation_of(card), layers=recording.layers[:1], scores=scores)
    plain = tokens_per_second(simulate(recording, replace(base, method="plain")))
    for table, setting, scenario in scenarios(base, recording.layers):
        stats = simulate(recording, scenario)
        speed = tokens_per_second(stats)
        row = {"table": table, "setting": setting, "tokens_per_second": round(speed, 2)}
        row |= {"speed_up": round(speed / plain, 4)}
        row |= {name: round(mean_of(stats, name), 4) for name in runs.FIGURES}
        names = sorted({source for stat in stats for source in stat.reuse_by_source})
        shares = {name: sum(s.reuse_by_source.get(name, 0) * s.steps for s in stats) for name in names}
        steps = sum(stat.steps for stat in stats)
        yield row | {"reuse_by_source": {name: round(share / steps, 4) for name, share in shares.items()}}


def scenarios(base: Scenario, layers: tuple[int, ...]) -> Iterator[tuple[str, str, Scenario]]:
    """Name of the table, of the row, and what to replay."""

    def with_speculation(**changes: Any) -> Scenario:
        return replace(base, speculation=replace(base.speculation, **changes))

    for method in ("serial", "mirror"):
        yield "draft", f"{method}, ordinary draft", replace(base, method=method, num_streams=0)
        yield "draft", f"{method}, streaming draft", replace(base, method=method)
    for source in SOURCES:
        for allocation in ("global", "per_row"):
            changes = {"root_source": source, "allocation": allocation, "kappa": 2, "roots": 16}
            yield "roots", f"{source}, {allocation}", with_speculation(**changes)
    for chosen in [(layer,) for layer in layers] + ([layers] if len(layers) > 1 else []):
        name = f"exit after {', '.join(map(str, chosen))}"
        yield "exit", f"{name}, proxy", replace(with_speculation(root_source="proxy"), layers=chosen)
        yield "exit", f"{name}, progressive", replace(base, layers=chosen)
    for source in SOURCES:
        for budget in BUDGETS:
            yield "budget", f"{source}, {budget} roots", with_speculation(root_source=source, roots=budget)
    yield "scores", "default", replace(base, scores=RootScores())
    yield "scores", "fitted", base
    for gamma in (3, 5, 7, 9, 12):
        yield "gamma", f"gamma {gamma}", with_speculation(gamma=gamma)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Reuse and speed-up over the root budget, by source; one column per card, sampled texts dashed."""

    def fill(figure: Any) -> None:
        axes = figure.subplots(2, len(CARDS), sharex=True, sharey="row")
        for column, card in enumerate(CARDS):
            for source, temperature in product(SOURCES, (0.0, 1.0)):
                of_card = [
                    r for r in rows if (r["card"], r["table"], r["temperature"]) == (card, "budget", temperature)
                ]
                line = [row for row in of_card if row["setting"].startswith(source)]
                look = {"linestyle": "--" if temperature else "-", "color": COLOURS[source], "marker": "."}
                for axis, name in zip(axes[:, column], ("reuse_rate", "speed_up"), strict=True):
                    axis.plot(BUDGETS, [row[name] for row in line], label=f"{source}, T={temperature:g}", **look)
            axes[0, column].set_title(card)
            axes[1, column].set_xlabel("branches prepared per step (roots)")
        axes[0, 0].set(ylabel="windows that were ready", ylim=(0, 1))
        axes[1, 0].set(ylabel="times plain decoding")
        axes[1, 0].set_ylim(bottom=0)
        legend_outside(axes[0, -1])
        figure.suptitle("SIMULATED from recorded texts of the storyteller", fontsize=9)

    save(path, fill, size=(12, 5.5))


if __name__ == "__main__":
    main()
