"""What huge pages bring: the same bundles with and without them, by turns, in a process of its own each time.

    python bench/studies/huge_pages.py scaled-fp32.mirror scaled-int8.mirror --layout shared --output huge_pages.json

One process after the other loads the bundle by the card as it is, or by the same one with `target.huge_pages = false`.
Says how long loading took both ways, what was on huge pages, and the tokens per second of plain and serial decoding:
medians over processes (of the medians over texts), and of the ratios within a turn. `first_text` is the ratio of the
first one, beside which memory moves. Steps are compared, not texts: these go on past their end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs

METHODS = ("plain", "serial")


def main() -> None:
    """Measure, print and write the report; with `--once`, be one of the processes."""
    parser = runs.parser(__doc__, count=3, measures_steps=True)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--card", type=Path, default=Path("device_maps/cpu.toml"))
    parser.add_argument("--layout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="decode with the card as it is, print one JSON object")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(decode(options)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / options.card.name
        small.write_text(options.card.read_text(encoding="utf-8").replace("[target]", "[target]\nhuge_pages = false"))
        for bundle in options.bundles:
            turns = [
                [run_once(bundle, card, options) for card in (options.card, small)] for _ in range(options.repeats)
            ]
            rows += report_of(bundle, turns)
            runs.print_rows(rows[-len(METHODS) :], tuple(rows[0]))
    header = {"card": options.card.stem, "layout": options.layout, "tokens": options.tokens, "repeats": options.repeats}
    header["ends"] = runs.ends(options)
    runs.finish(runs.header(options.bundles[0], **header) | {"rows": rows}, options.output)


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Load the first bundle; how long that took, what is on huge pages, and tokens per second by method."""
    prompts = runs.spread_prompts(options.prompts, options.count)
    started = time.perf_counter()
    card = {"device_map": str(options.card), "layout": options.layout, "use_tuned": False}
    with MirrorPipeline.load(options.bundles[0], **card) as pipe:
        load_s = time.perf_counter() - started
        settings = [runs.Setting(name=method, method=method) for method in METHODS]
        found = runs.decode_all(pipe, settings, prompts, runs.text_config(options))
        pages = [line for line in pipe.placement if line.startswith("huge pages")]
    speeds = {method: median(result.stats.tokens_per_second for result in found[method]) for method in METHODS}
    first = found[METHODS[0]][0].stats.tokens_per_second
    return {"load_s": load_s, "pages": pages[0] if pages else "none", "first": first, **speeds}


def run_once(bundle: Path, card: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`decode` in a process of its own: memory that another pipeline has left must not be used again."""
    command = [sys.executable, __file__, str(bundle), "--once", "--card", str(card), "--prompts", str(options.prompts)]
    command += ["--count", str(options.count), "--tokens", str(options.tokens)]
    command += ["--layout", options.layout] if options.layout else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report_of(bundle: Path, turns: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per method for one bundle: with huge pages, and without."""
    load_s, load_s_small = (round(median(turn[side]["load_s"] for turn in turns), 2) for side in (0, 1))
    return [
        {
            "bundle": bundle.name,
            "method": method,
            "tokens_per_second": round(median(turn[0][method] for turn in turns), 1),
            "small_pages": round(median(turn[1][method] for turn in turns), 1),
            "ratio": round(median(turn[0][method] / turn[1][method] for turn in turns), 3),
            "first_text": round(median(turn[0]["first"] / turn[1]["first"] for turn in turns), 3),
            "load_s": load_s,
            "load_s_small": load_s_small,
            "pages": turns[0][0]["pages"],
        }
        for method in METHODS
    ]


if __name__ == "__main__":
    main()
