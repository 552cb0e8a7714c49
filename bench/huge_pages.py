"""What huge pages bring: the same bundles with and without them, by turns.

    python bench/huge_pages.py scaled-fp32.mirror scaled-int8.mirror --layout shared --output huge_pages.json

Every bundle is loaded twice, the second time by the same card with `target.huge_pages = false`. Says how long loading
took both ways, how many MiB were on huge pages, and the tokens per second of plain and serial decoding: medians over
texts and repeats, and of the ratios within a turn.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs

METHODS = ("plain", "serial")


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=3)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--card", type=Path, default=Path("device_maps/cpu.toml"))
    parser.add_argument("--layout")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    config = GenerationConfig(max_new_tokens=options.tokens, ignore_eos=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / options.card.name
        small.write_text(options.card.read_text(encoding="utf-8").replace("[target]", "[target]\nhuge_pages = false"))
        for bundle in options.bundles:
            rows += measure(bundle, (options.card, small), options.layout, (prompts, config, options.repeats))
            runs.print_rows(rows[-len(METHODS) :], tuple(rows[0]))
    report = runs.header(options.bundles[0], layout=options.layout, tokens=options.tokens, repeats=options.repeats)
    runs.finish(report | {"rows": rows}, options.output)


def measure(
    bundle: Path, cards: tuple[Path, Path], layout: str | None, job: tuple[list[runs.Messages], GenerationConfig, int]
) -> list[dict[str, Any]]:
    """A row per method for one bundle: with huge pages, and without."""
    prompts, config, repeats = job
    settings = [runs.Setting(name=method, method=method) for method in METHODS]
    speeds: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        loaded = [load(bundle, card, layout) for card in cards]
        for pipe, _ in loaded:
            stack.enter_context(pipe)
        for _ in range(repeats):
            for number, (pipe, _) in enumerate(loaded):
                for method, results in runs.decode_all(pipe, settings, prompts, config).items():
                    speeds.setdefault((method, number), []).append(median(r.stats.tokens_per_second for r in results))
        lines = [line for line in loaded[0][0].placement if line.startswith("huge pages")]
    times = {"load_s": round(loaded[0][1], 2), "load_s_small": round(loaded[1][1], 2)}
    return [
        {
            "bundle": bundle.name,
            "method": method,
            "tokens_per_second": round(median(speeds[method, 0]), 1),
            "small_pages": round(median(speeds[method, 1]), 1),
            "ratio": round(median(a / b for a, b in zip(speeds[method, 0], speeds[method, 1], strict=True)), 3),
            **times,
            "placement": "; ".join(lines) or "no huge pages",
        }
        for method in METHODS
    ]


def load(bundle: Path, card: Path, layout: str | None) -> tuple[MirrorPipeline, float]:
    """A loaded bundle, and how long loading took."""
    started = time.perf_counter()
    pipe = MirrorPipeline.load(bundle, device_map=str(card), layout=layout, use_tuned=False)
    return pipe, time.perf_counter() - started


if __name__ == "__main__":
    main()
