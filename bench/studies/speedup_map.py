"""Speed-up over exit depth, window length, candidates per row and the draft's cost, drawn by the simulator.

    python bench/studies/speedup_map.py storyteller.mirror --cache FOLDER --plot speedup_map.png

Uses the recordings of `bench/studies/ablation.py` (made if missing). The target's pass is that of `paced-laptop`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mirrorsd.bench import runs
from mirrorsd.bench.studies.ablation import recorded
from mirrorsd.device_maps import Pace, load_device_map
from mirrorsd.runtime.loading import speculation_of
from mirrorsd.runtime.tuning.simulation import Scenario, simulate, tokens_per_second
from mirrorsd.training.plot_style import COLOURS, save

METHODS = ("serial", "mirror")
DRAFT_MS = (1, 2, 4, 6, 8, 12, 16, 24)
GAMMAS = (1, 2, 3, 5, 7, 9, 12)
KAPPAS = (1, 2, 4, 8)


def main() -> None:
    """Replay, draw and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    card = load_device_map("paced-laptop")
    assert card.pace is not None
    curves: dict[str, dict[str, list[float]]] = {}
    for temperature in (0.0, 1.0):
        recording, scores = recorded(options, temperature)
        base = Scenario(pace=card.pace, speculation=speculation_of(card), layers=recording.layers[:1], scores=scores)
        plain = tokens_per_second(simulate(recording, replace(base, method="plain")))
        for axis, lines in scenarios(base, recording.layers).items():
            for label, line in lines.items():
                speeds = [round(tokens_per_second(simulate(recording, one)) / plain, 4) for one in line]
                curves.setdefault(axis, {})[f"{label}, T={temperature:g}"] = speeds
    axes = {"draft round, ms": DRAFT_MS, "gamma": GAMMAS, "kappa (proxy, per row)": KAPPAS}
    axes["exit after layer"] = recording.layers
    report = runs.header(options.bundle, simulated=True, ends=runs.ends(options), axes=axes, speed_up=curves)
    runs.finish(report, options.output)
    draw(axes, curves, options.plot)


def scenarios(base: Scenario, layers: tuple[int, ...]) -> dict[str, dict[str, list[Scenario]]]:
    """For every axis of the picture, the lines and what to replay along them."""

    def speculating(method: str = "mirror", **changes: Any) -> Scenario:
        return replace(base, method=method, speculation=replace(base.speculation, **changes))

    def paced(method: str, draft_ms: int) -> Scenario:
        pace: Pace = replace(base.pace, draft_ms=((1.0, float(draft_ms)), (32.0, float(draft_ms))))
        return replace(base, method=method, pace=pace)

    per_row = {"root_source": "proxy", "allocation": "per_row"}
    return {
        "draft round, ms": {m: [paced(m, ms) for ms in DRAFT_MS] for m in METHODS},
        "gamma": {m: [speculating(m, gamma=gamma) for gamma in GAMMAS] for m in METHODS},
        "kappa (proxy, per row)": {"mirror": [speculating(kappa=kappa, **per_row) for kappa in KAPPAS]},
        "exit after layer": {
            source: [replace(speculating(root_source=source), layers=(layer,)) for layer in layers]
            for source in ("proxy", "progressive")
        },
    }


def draw(axes: dict[str, Any], curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """One panel per axis; a method or a source has one colour in all of them, sampled texts are dashed."""
    words = {
        "draft round, ms": "a round of the draft, ms",
        "gamma": "longest window (gamma)",
        "kappa (proxy, per row)": "branches per row (kappa), proxy",
        "exit after layer": "exit after layer",
    }

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(axes), sharey=True)
        for panel, (axis, values) in zip(panels, axes.items(), strict=True):
            for label, speeds in curves[axis].items():
                colour = COLOURS[label.split(",")[0]]
                panel.plot(
                    values, speeds, "--" if label.endswith("T=1") else "-", color=colour, label=label, marker="."
                )
            panel.axhline(1.0, color=COLOURS["plain"], linewidth=0.8)
            panel.set_xlabel(words.get(axis, axis))
            panel.xaxis.get_major_locator().set_params(integer=True)
        panels[0].set_ylabel("times plain decoding")
        entries = {
            label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries))
        figure.suptitle("SIMULATED on the pace of paced-laptop, from recorded texts of the storyteller", fontsize=9)

    save(path, fill, size=(13, 4))


if __name__ == "__main__":
    main()
