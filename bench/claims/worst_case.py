"""What `auto` loses against plain decoding on prompts chosen to defeat the draft, the very first request included.

    python bench/claims/worst_case.py storyteller.mirror --device-map paced-laptop --output worst_case.json
    python bench/claims/worst_case.py cut.mirror --device-map cpu --ordinary --temperatures 0 1 --output never.json

Prompts are random tokens and texts in other languages than the draft knows; greedy and at T=1.5, where nothing can be
foreseen. `--ordinary` takes the questions of `--prompts` instead, for a bundle whose draft is never right: an untrained
cut of the target (`samples/cut_draft.py`). `first` is the first request after loading, with nothing learned from other
texts (and nothing tuned, unless `--tuned`); `later` the next one. Plain decoding of the same prompt runs by turns with
it, before or after; both start with caches that hold another text. Losses are over the time of the steps, those called
`whole` over the time from the call to the last token, the prompt included; medians over repeats, then over the time of
all prompts together, and the worst prompt. Negative ones are gains. `waited` is the share of plain decoding's time that
the target of `auto` has waited for the draft: of what is lost, the part that hardly depends on how busy the machine is.
Texts are compared.
"""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.reporting.stats import GenerationStats
from mirrorsd.runtime.session import MirrorSession

FOREIGN = (
    "Der Hund lief schnell über die alte Brücke und bellte die Enten an.",
    "La pluie tombait depuis trois jours sur les toits gris de la ville.",
    "Пришла весна, и снег в горах начал медленно таять.",
    "むかしむかし、あるところにおじいさんとおばあさんがいました。",
)
OTHER_TEXT = [7, 7, 7]

Prompt = dict[str, Any]
"""What `generate` is given."""
Seconds = dict[str, tuple[list[float], list[float]]]
"""By `first`, `first_whole`, `later`, `later_whole`: of plain decoding and of `auto`, one each per repeat.

`first_waited` and `later_waited`: of plain decoding, and that with what the target of `auto` has waited for the draft.
"""


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=4, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help="start from what `mirrorsd tune` found, layout included")
    parser.add_argument(
        "--ordinary", action="store_true", help="the questions of --prompts, for a draft that is no good"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.5])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=options.tuned) as pipe:
        groups = prompts_of(options, pipe.manifest.target.shape.vocab_size)
        for temperature in options.temperatures:
            config = runs.seeded(runs.text_config(options, temperature), 1)
            rows += [measure(pipe, name, prompts, config, options.repeats) for name, prompts in groups.items()]
        where = {"device_map": options.device_map, "layout": pipe.layout, "is_tuned": options.tuned}
        where["ends"] = runs.ends(options)
    runs.print_rows(rows, tuple(rows[0]))
    report = runs.header(options.bundle, **where, tokens=options.tokens, repeats=options.repeats)
    runs.finish(report | {"rows": rows}, options.output)


def prompts_of(options: argparse.Namespace, vocab_size: int) -> dict[str, list[Prompt]]:
    """What is decoded, by kind."""
    if options.ordinary:
        return {"ordinary": [{"messages": one} for one in runs.spread_prompts(options.prompts, options.count)]}
    random = np.random.default_rng(0)
    ids = [random.integers(3, vocab_size, 40).tolist() for _ in range(options.count)]
    return {
        "random": [{"token_ids": one} for one in ids],
        "foreign": [{"prompt": text} for text in FOREIGN[: options.count]],
    }


def measure(
    pipe: MirrorPipeline, name: str, prompts: list[Prompt], config: GenerationConfig, repeats: int
) -> dict[str, Any]:
    """Losses of first requests (what is known of the pair as it was loaded before each) and of those after them."""
    session, pairs = pipe.session(), deepcopy(pipe.engine.known.pairs)
    session.generate(config=config.with_overrides({"method": "mirror"}), **prompts[0])
    found: list[Seconds] = []
    steps, num_different = {"plain": 0, "serial": 0, "mirror": 0}, 0
    for prompt in prompts:
        seconds: Seconds = {}
        for repeat in range(repeats):
            pipe.engine.known.pairs = deepcopy(pairs)
            for request in ("first", "later"):
                plain, auto = by_turns(session, prompt, config, auto_first=repeat % 2 == 1)
                num_different += plain.token_ids != auto.token_ids
                for of_one, result in enumerate((plain, auto)):
                    seconds.setdefault(request, ([], []))[of_one].append(decode_seconds(result.stats))
                    seconds.setdefault(f"{request}_whole", ([], []))[of_one].append(result.stats.seconds)
                waited = decode_seconds(plain.stats) + waited_seconds(auto)
                for of_one, value in enumerate((decode_seconds(plain.stats), waited)):
                    seconds.setdefault(f"{request}_waited", ([], []))[of_one].append(value)
                of_auto = auto.stats.steps_by_method
                steps = {method: count + of_auto.get(method, 0) for method, count in steps.items()}
        found.append(seconds)
    session.close()
    pipe.engine.known.pairs = pairs
    row: dict[str, Any] = {"prompts": f"{name}, T={config.temperature or 0.0:g}"}
    for request in found[0]:
        medians = [(median(plain), median(auto)) for plain, auto in (seconds[request] for seconds in found)]
        row |= losses(request, medians)
    return row | {"steps": steps, "texts_that_differ": num_different}


def decode_seconds(stats: GenerationStats) -> float:
    """The time that `tokens_per_second` is over."""
    return stats.tokens_per_step * stats.steps / stats.tokens_per_second


def waited_seconds(result: GenerationResult) -> float:
    """How long the target has waited for the draft."""
    return sum(span.seconds for span in result.spans if (span.device, span.name) == ("host", "exposed"))


def losses(request: str, seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """What `auto` loses on all prompts together, and on the worst; from the seconds of plain decoding and of `auto`.

    >>> losses("first", [(1.0, 1.1), (3.0, 2.9)])
    {'first': 0.0, 'first_worst': 0.1}
    """
    together = sum(auto for _, auto in seconds) / sum(plain for plain, _ in seconds) - 1.0
    worst = max(auto / plain - 1.0 for plain, auto in seconds)
    return {request: round(together, 4), f"{request}_worst": round(worst, 4)}


def by_turns(
    session: MirrorSession, prompt: dict[str, Any], config: GenerationConfig, *, auto_first: bool
) -> tuple[GenerationResult, GenerationResult]:
    """The same text by plain decoding and by `auto`."""
    found = {}
    for method in ("auto", "plain") if auto_first else ("plain", "auto"):
        session.generate(token_ids=OTHER_TEXT, max_new_tokens=2, ignore_eos=True, temperature=0.0, method="serial")
        found[method] = session.generate(config=config.with_overrides({"method": method}), **prompt)
    return found["plain"], found["auto"]


if __name__ == "__main__":
    main()
