"""What holds a speculative step back: its time by parts, and the speed if one of them cost nothing.

    mirrorsd tune scaled.mirror --device-map cpu
    python bench/studies/step_budget.py scaled.mirror --device-map cpu --temperature 1 --asked 2.0

The parts, means over the steps of all texts (which go on past their end) as tuned, in milliseconds: `one_row`, a pass
of the target over one row (as plain decoding takes it); what its `more_rows` cost; `draft`, waiting for it; the `host`.
`round` is one of the draft's rounds within decoding, `alone` its rounds by size, repeated with nothing between: what
lies between them is caches that the target's weights have emptied. `without_*` is the speed over plain decoding if that
part cost nothing, `needed` the tokens per step that the speed `--asked` for takes at these times.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mirrorsd import CancelToken, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.graphs.names import Method
from mirrorsd.machine.tuning.part_times import measure_parts
from mirrorsd.runtime.ledger import Span

ROUNDS = ("fresh", "expand")
METHODS: tuple[Method, ...] = ("plain", "serial", "mirror")


def main() -> None:
    """Decode by every method, print and write the report."""
    parser = runs.parser(__doc__, count=6, tokens=128, measures_steps=True)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--asked", type=float, default=2.0, help="speed over plain decoding to reach")
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    config = runs.text_config(options, options.temperature)
    found: dict[Method, list[GenerationResult]] = {method: [] for method in METHODS}
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        alone = measure_parts(pipe.engine, CancelToken()).draft
        for number, messages in enumerate([prompts[0], *prompts]):
            for method, results in found.items():
                results.append(pipe.generate(messages=messages, config=runs.seeded(config, number), method=method))
        layout = pipe.layout
    steps = {method: step_parts(results[1:]) for method, results in found.items()}
    rows = [{"method": method, **budget(parts, steps["plain"], options.asked)} for method, parts in steps.items()]
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, device_map=options.device_map, layout=layout, temperature=options.temperature)
    report |= {"ends": runs.ends(options), "asked": options.asked}
    report |= {"alone": {size: round(ms, 3) for size, ms in alone.items()}, "rows": rows}
    runs.finish(report, options.output)


def step_parts(results: Sequence[GenerationResult]) -> dict[str, float]:
    """Means over the steps: `tokens`, and in milliseconds the `step`, its `target` and `draft`, and one `round`."""
    steps = [(step, runs.spans_in(result, step)) for result in results for step in result.steps]
    rounds = [span.seconds for _, spans in steps for span in spans if span.device == "draft" and span.name in ROUNDS]
    return {
        "tokens": fmean(1 + step.num_accepted for step, _ in steps),
        "step": 1e3 * fmean(step.ended - step.started for step, _ in steps),
        "target": 1e3 * sum(s.seconds for _, spans in steps for s in spans if runs.is_of_pass(s)) / len(steps),
        "draft": 1e3 * sum(_total(spans, "host", ("exposed",)) for _, spans in steps) / len(steps),
        "rounds": len(rounds) / len(steps),
        "round": 1e3 * fmean(rounds) if rounds else 0.0,
    }


def budget(parts: dict[str, float], plain: dict[str, float], asked: float) -> dict[str, Any]:
    """A row of the report, from what steps of one method and of plain decoding take."""
    more_rows = parts["target"] - plain["target"]
    host = parts["step"] - parts["target"] - parts["draft"]
    saved = {"draft": parts["draft"], "more_rows": more_rows, "host": host, "all": parts["draft"] + more_rows + host}
    row = {"tokens": parts["tokens"], "step": parts["step"], "one_row": plain["target"], "more_rows": more_rows}
    row |= {"draft": parts["draft"], "host": host, "rounds": parts["rounds"], "round": parts["round"]}
    row |= {"speed": _speed(parts, plain, 0.0)}
    row |= {f"without_{name}": _speed(parts, plain, ms) for name, ms in saved.items()}
    row |= {"needed": asked * parts["step"] / plain["step"]}
    return {name: round(value, 3) for name, value in row.items()}


def _speed(parts: dict[str, float], plain: dict[str, float], saved_ms: float) -> float:
    """Tokens per second over plain decoding's, with steps that much shorter."""
    return parts["tokens"] * plain["step"] / (parts["step"] - saved_ms)


def _total(spans: Sequence[Span], device: str, names: Sequence[str]) -> float:
    return sum(span.seconds for span in spans if span.device == device and span.name in names)


if __name__ == "__main__":
    main()
