"""Filters (top-k, top-p, min-p) and the penalty of repetition: tokens a step and speed, beside plain decoding.

    python bench/studies/filtered_sampling.py storyteller.mirror --output filtered.json

The first setting has none; those without a temperature are greedy. Plain and serial decoding of the same texts take
turns; a seed per prompt.
"""

from pathlib import Path
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.6, "top_p": 0.9},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
)
SETTINGS = (runs.Setting(name="plain", method="plain"), runs.Setting(name="serial", method="serial"))
COLUMNS = ("sampling", "tokens_per_step", "tokens_per_second", "over_plain", "identical")


def main() -> None:
    """Run, print and write the report."""
    parser = runs.parser(__doc__, count=24)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout", choices=("apart", "shared"), default="shared")
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    load = {"device_map": options.device_map, "layout": options.layout, "use_tuned": False}
    rows = []
    with MirrorPipeline.load(options.bundle, **load) as pipe:
        for sampling in SAMPLING:
            config = runs.text_config(options).with_overrides(sampling)
            found = runs.decode_all(pipe, SETTINGS, prompts, config)
            of_plain, of_serial = runs.sum_up(found["plain"]), runs.sum_up(found["serial"])
            row = {"sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()), **of_serial}
            row["over_plain"] = round(row["tokens_per_second"] / of_plain["tokens_per_second"], 3)
            row["identical"] = [r.token_ids for r in found["plain"]] == [r.token_ids for r in found["serial"]]
            rows.append(row)
            runs.print_rows(rows[-1:], COLUMNS)
    report = runs.header(options.bundle, device_map=options.device_map, layout=options.layout)
    report["ends"] = runs.ends(options)
    runs.finish(report | {"prompts": len(prompts), "tokens": options.tokens, "rows": rows}, options.output)


if __name__ == "__main__":
    main()
