"""Reuse by source over root budgets: which roots are found in real runs, by default and by fitted scores.

    python bench/studies/root_budgets.py storyteller.mirror --output root_budgets.json

Scores are fitted to recordings of other prompts than those measured.
"""

from pathlib import Path
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.policy.root_scores import RootScores
from mirrorsd.runtime.tuning.recorder import record_texts
from mirrorsd.runtime.tuning.score_fitting import fit_scores

BUDGETS = (4, 8, 16, 32)


def main() -> None:
    """Measure greedy and sampled texts, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--sources", default="progressive", help="separated by commas")
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    others = runs.spread_prompts(options.prompts, options.count, first=3)
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        config = runs.text_config(options, temperature)
        with MirrorPipeline.load(options.bundle, device_map="cpu", use_tuned=False) as pipe:
            fitted = fit_scores([record_texts(pipe, others, config)], pipe.speculation.gamma)
        for name, scores in (("default", RootScores()), ("fitted", fitted)):
            rows += measure(options, prompts, config, name, scores)
    report = runs.header(options.bundle, device_map=options.device_map, prompts=len(prompts), tokens=options.tokens)
    runs.finish(report | {"ends": runs.ends(options), "rows": rows}, options.output)


def measure(
    options: Any, prompts: Any, config: GenerationConfig, name: str, scores: RootScores
) -> list[dict[str, Any]]:
    """One row per source and budget."""
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=False) as pipe:
        pipe.engine.known.root_scores = scores
        settings = [
            runs.Setting(name=f"{source}, {budget} roots", speculation={"roots": budget, "root_source": source})
            for source in options.sources.split(",")
            for budget in BUDGETS
        ]
        found = runs.decode_all(pipe, settings, prompts, config)
    rows = [
        {"temperature": config.temperature or 0.0, "scores": name, "setting": setting, **runs.sum_up(results)}
        for setting, results in found.items()
    ]
    runs.print_rows(
        rows, ("scores", "setting", "tokens_per_second", "tokens_per_step", "reuse_rate", "reuse_by_source")
    )
    return rows


if __name__ == "__main__":
    main()
