"""Does the simulator agree with real runs? The same texts, run for real and replayed, by each method and head.

    python bench/claims/simulator.py storyteller.mirror --recording texts.npz --device-map paced-laptop

Without the file, the texts are recorded first and kept there. A paced card is replayed at its own pace; a real one at
the times that `mirrorsd tune` measures, both devices at work.
"""

from pathlib import Path
from typing import Any

from mirrorsd import CancelToken, GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.machine.tuning.part_times import measure_parts, pace_of
from mirrorsd.machine.tuning.recorder import record_texts
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, mean_of, simulate, tokens_per_second

METHODS = ("plain", "serial", "mirror", "lookup")


def main() -> None:
    """Record, run, replay, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    config = runs.seeded(runs.text_config(options, options.temperature), 1)
    if not options.recording.exists():
        with MirrorPipeline.load(options.bundle, device_map="cpu", use_tuned=False) as pipe:
            heads = [head.kind for head in pipe.manifest.heads]
            record_texts(pipe, prompts, config, heads=heads).write(options.recording)
    rows = agreement(options, prompts, config, Recording.read(options.recording))
    report = runs.header(options.bundle, device_map=options.device_map, prompts=len(prompts), tokens=options.tokens)
    report["ends"] = runs.ends(options)
    runs.finish(report | {"temperature": options.temperature, "rows": rows}, options.output)


def agreement(
    options: Any, prompts: list[runs.Messages], config: GenerationConfig, recording: Recording
) -> list[dict[str, Any]]:
    """One row per method: real and simulated speed, and the figures that explain a difference."""
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=False) as pipe:
        pace = pipe.device_map.pace or pace_of(measure_parts(pipe.engine, CancelToken()))
        pipe.engine.known.target_ms = pace.target_ms
        methods = (*METHODS, *(head.kind for head in recording.heads))
        found = runs.decode_all(pipe, [runs.Setting(name=m, method=m) for m in methods], prompts, config)
        speculation = pipe.speculation
    rows = []
    for method in methods:
        replayed = simulate(recording, Scenario(pace=pace, speculation=speculation, method=method))
        stats = [result.stats for result in found[method]]
        row: dict[str, Any] = {"method": method, "real": round(tokens_per_second(stats), 2)}
        row["simulated"] = round(tokens_per_second(replayed), 2)
        row["ratio"] = round(row["simulated"] / row["real"], 4)
        for name in runs.FIGURES:
            row[name] = [round(mean_of(stats, name), 3), round(mean_of(replayed, name), 3)]
        row["host_ms"] = runs.sum_up(found[method])["step_ms"]["host"]
        rows.append(row)
    runs.print_rows(rows, tuple(rows[0]))
    return rows


if __name__ == "__main__":
    main()
