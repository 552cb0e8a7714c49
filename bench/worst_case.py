"""What `auto` loses against plain decoding on prompts chosen to defeat the draft, the very first request included.

    python bench/worst_case.py storyteller.mirror --device-map paced-laptop --output worst_case.json

Prompts are random tokens and texts in other languages than the draft knows; greedy and at T=1.5, where nothing can be
foreseen. `first` is the first request after loading, with nothing tuned and nothing learned; `later` the next one.
Plain decoding of the same prompt runs before each. Losses are over the time of the steps; negative ones are gains.
"""

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.cost_book import CostBooks

FOREIGN = (
    "Der Hund lief schnell über die alte Brücke und bellte die Enten an.",
    "La pluie tombait depuis trois jours sur les toits gris de la ville.",
    "Пришла весна, и снег в горах начал медленно таять.",
    "むかしむかし、あるところにおじいさんとおばあさんがいました。",
)
TEMPERATURES = (None, 1.5)


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=4, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=False) as pipe:
        random = np.random.default_rng(0)
        vocab_size = pipe.manifest.target.shape.vocab_size
        prompts: list[dict[str, Any]] = [
            {"token_ids": random.integers(3, vocab_size, 40).tolist()} for _ in range(options.count)
        ]
        prompts += [{"prompt": text} for text in FOREIGN[: options.count]]
        for temperature in TEMPERATURES:
            config = GenerationConfig(max_new_tokens=options.tokens, temperature=temperature, seed=1, ignore_eos=True)
            rows += [measure(pipe, "random", prompts[: options.count], config, options.repeats)]
            rows += [measure(pipe, "foreign", prompts[options.count :], config, options.repeats)]
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, device_map=options.device_map, tokens=options.tokens)
    runs.finish(report | {"rows": rows}, options.output)


def measure(
    pipe: MirrorPipeline, name: str, prompts: list[dict[str, Any]], config: GenerationConfig, repeats: int
) -> dict[str, Any]:
    """Losses of first requests (a new book of costs before each) and of those after them; medians over repeats."""
    session = pipe.session()
    session.generate(config=config.with_overrides({"method": "mirror"}), **prompts[0])
    first, later, steps = [], [], {"plain": 0, "serial": 0, "mirror": 0}
    for prompt in prompts:
        losses: list[list[float]] = [[], []]
        for _ in range(repeats):
            pipe.engine.books = CostBooks()
            for number in range(2):
                before = session.generate(config=config.with_overrides({"method": "plain"}), **prompt).stats
                stats = session.generate(config=config, **prompt).stats
                losses[number].append(before.tokens_per_second / stats.tokens_per_second - 1.0)
                steps = {method: count + stats.steps_by_method.get(method, 0) for method, count in steps.items()}
        first.append(median(losses[0]))
        later.append(median(losses[1]))
    session.close()
    temperature = config.temperature or 0.0
    row: dict[str, Any] = {"prompts": f"{name}, T={temperature:g}", "first": round(median(first), 4)}
    row |= {"first_worst": round(max(first), 4), "later": round(median(later), 4), "later_worst": round(max(later), 4)}
    return row | {"steps": steps}


if __name__ == "__main__":
    main()
