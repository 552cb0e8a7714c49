"""Where a step's host time goes, and whether steps take what the latency law says.

    python bench/claims/host_time.py storyteller.mirror --device-map cpu --output host_time.json

Gaps between the spans of the ledger, medians over the steps of all texts, in milliseconds: `to_target` from the step's
start to the prefix's, `between` the stages, `after_target` to the step's end, waiting for the draft left out.
`efficiency` is the law's step (prefix, exit, suffix, verify and fallbacks, as they took side by side) over the measured
one; `exposed` the time spent waiting for the draft over the step's, fallbacks apart. `round` is the draft's median
round as its own thread sees it, `asked` from asking for a window to having it, with both hand-overs. These are costs of
steps: texts go on past their end, and tokens per second are no speed of texts.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.machine.tuning.contest import predict_step_ms


def main() -> None:
    """Measure serial and mirror decoding, print and write the report."""
    parser = runs.parser(__doc__, count=4, measures_steps=True)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout")
    parser.add_argument("--switch-ms", type=float, default=1e3 * sys.getswitchinterval(), help="Python's thread switch")
    options = parser.parse_args()
    sys.setswitchinterval(options.switch_ms / 1e3)
    prompts = runs.spread_prompts(options.prompts, options.count)
    with MirrorPipeline.load(
        options.bundle, device_map=options.device_map, layout=options.layout, use_tuned=False
    ) as pipe:
        layout = pipe.layout
        settings = [runs.Setting(name=method, method=method) for method in ("plain", "serial", "mirror")]
        found = runs.decode_all(pipe, settings, prompts, runs.text_config(options))
    rows = [{"method": method, **gaps(results), **law(results), **rounds(results)} for method, results in found.items()]
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, device_map=options.device_map, layout=layout, switch_ms=options.switch_ms)
    runs.finish(report | {"ends": runs.ends(options), "rows": rows}, options.output)


def gaps(results: list[GenerationResult]) -> dict[str, Any]:
    """Median gaps of a step, and their sum as `host`."""
    found: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for step in result.steps:
            inside = runs.spans_in(result, step)
            stages = sorted(filter(runs.is_of_pass, inside), key=lambda s: s.start)
            if not stages:
                continue
            waited = sum(s.seconds for s in inside if s.name == "exposed")
            busy = sum(s.seconds for s in stages)
            parts = {
                "to_target": stages[0].start - step.started,
                "between": stages[-1].end - stages[0].start - busy,
                "after_target": step.ended - stages[-1].end - waited,
            }
            for name, seconds in parts.items():
                found[name].append(1e3 * seconds)
            found["host"].append(1e3 * sum(parts.values()))
    return {name: round(median(values), 4) for name, values in found.items()}


def law(results: list[GenerationResult]) -> dict[str, Any]:
    """Efficiency against the latency law, and the share of the step that waits for the draft beside fallbacks."""
    predicted = [predict_step_ms(result) for result in results]
    measured = [1e3 * sum(s.ended - s.started for s in result.steps) / len(result.steps) for result in results]
    late = [
        1e3 * sum(span.seconds for span in r.spans if span.name == "exposed" and _is_late(r, span.start))
        for r in results
    ]
    steps = [len(result.steps) for result in results]
    exposed = sum(late) / sum(m * n for m, n in zip(measured, steps, strict=True))
    ratio = median(p / m for p, m in zip(predicted, measured, strict=True))
    return {"efficiency": round(ratio, 4), "exposed": round(exposed, 4), "step_ms": round(median(measured), 3)}


def rounds(results: list[GenerationResult]) -> dict[str, Any]:
    """The draft's rounds and what waiting for one takes, median milliseconds, and tokens per second."""
    spans = [span for result in results for span in result.spans]
    by_draft = [1e3 * s.seconds for s in spans if s.device == "draft" and s.name in ("fresh", "expand")]
    asked = [1e3 * s.seconds for s in spans if s.name == "exposed"]
    found = {name: round(median(times), 3) if times else 0.0 for name, times in (("round", by_draft), ("asked", asked))}
    return found | {"tokens_per_second": round(median(result.stats.tokens_per_second for result in results), 1)}


def _is_late(result: GenerationResult, moment: float) -> bool:
    """Whether the waiting belongs to a step whose window was being finished."""
    return any(s.started <= moment <= s.ended and s.next_source == "late" for s in result.steps)


if __name__ == "__main__":
    main()
