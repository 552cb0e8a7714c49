"""Plain decoding of bundles by turns: tokens per second of each, and over the first one's.

So it is with a mixture of experts beside a dense model of the size that a token goes through:

    python bench/studies/export_memory.py --size active --precision int8 --folder scratch --keep
    python bench/studies/export_memory.py --size 1b-mixture --precision int8 --folder scratch --keep
    python bench/claims/models/plain_speed.py scratch/active-int8.mirror scratch/1b-mixture-int8.mirror

Tokens are sampled so hot that one is hardly likelier than another: each goes to experts of its own, as a real text's
do. Random models never end a text, so ends are ignored. The interval holds the ratio of medians in 95 of 100 cases
(turns are drawn again).
"""

import argparse
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs

_NUM_DRAWN = 2_000
_HOT = 50.0
"""At this temperature the lead of `export_memory.py`'s models for the token before is gone."""


def main() -> None:
    """Measure, compare, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(MirrorPipeline.load(bundle, device_map=options.device_map, use_tuned=False))
            for bundle in options.bundles
        ]
        speeds = measure(pipes, options.turns, options.tokens)
    rows = [
        {"bundle": bundle.name} | over(speeds[0], found) for bundle, found in zip(options.bundles, speeds, strict=True)
    ]
    runs.print_rows(rows, tuple(rows[0]))
    head = runs.header(options.bundles[0], device_map=options.device_map, turns=options.turns, tokens=options.tokens)
    runs.finish(head | {"ends": "ignored", "rows": rows}, options.output)


def measure(pipes: list[MirrorPipeline], turns: int, tokens: int) -> list[list[float]]:
    """Tokens per second of every bundle's turns; who comes first changes, and the first turn of each is left out."""
    settings = GenerationConfig(
        max_new_tokens=tokens, temperature=_HOT, ignore_eos=True, method="plain", use_defaults=False
    )
    found: list[list[float]] = [[] for _ in pipes]
    for turn in range(turns + 1):
        for number in sorted(range(len(pipes)), key=lambda number: (number + turn) % len(pipes)):
            text = pipes[number].generate("!", config=runs.seeded(settings, turn))
            found[number].append(text.stats.tokens_per_second)
    return [speeds[1:] for speeds in found]


def over(first: list[float], speeds: list[float]) -> dict[str, Any]:
    """A bundle's row: its median, that over the first bundle's, and the interval."""
    drawn = random.Random(0)
    ratios = sorted(
        median(drawn.choices(speeds, k=len(speeds))) / median(drawn.choices(first, k=len(first)))
        for _ in range(_NUM_DRAWN)
    )
    ends = [round(ratios[int(share * _NUM_DRAWN)], 3) for share in (0.025, 0.975)]
    return {
        "tokens_per_second": round(median(speeds), 2),
        "over_first": round(median(speeds) / median(first), 3),
        "interval": ends,
    }


if __name__ == "__main__":
    main()
