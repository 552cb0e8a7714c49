"""What `auto` makes of a bundle with several sources, over the best single method and over plain decoding.

    python bench/claims/best_method.py pair.mirror --count 24 --repeats 2 --temperatures 0 1 --output best_method.json

Every text is decoded by all `--methods` by turns, each in a session of its own; who comes first changes. How fast a
session is depends on where its caches lie in memory (two of one method differ by up to 3 %), so that every repeat has
new ones, opened in another order. Nothing is tuned, and with an empty `MIRRORSD_CACHE` nothing was learned before. A
method's speed is all tokens over the sum of each text's median time. The intervals hold the ratios in some 95 of 100
cases (texts are drawn again, and the result is widened as their number asks for).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd import GenerationConfig, MirrorPipeline, MirrorSession
from mirrorsd.bench import runs
from mirrorsd.cli.bench.intervals import widened
from mirrorsd.runtime.policy import account

_NUM_DRAWN = 2_000
_OWN = "auto"


def main() -> None:
    """Measure, compare, print and write the report."""
    parser = runs.parser(__doc__, count=24, tokens=64)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--methods", default="plain,lookup,auto", help="separated by commas; plain and auto among them")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--with", dest="changed", metavar="NAME=VALUE", help="a number of account.py at another value")
    options = parser.parse_args()
    if options.changed:
        name, _, value = options.changed.partition("=")
        account._BY = replace(account._BY, **{name: type(getattr(account._BY, name))(value)})
    prompts = runs.spread_prompts(options.prompts, options.count)
    rows = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=False) as pipe:
        for temperature in options.temperatures:
            config = runs.seeded(runs.text_config(options, temperature), 1)
            seconds, tokens, steps = measure(pipe, prompts, config, options.methods.split(","), options.repeats)
            rows.append({"temperature": temperature, **compared(seconds, tokens), "steps": steps})
            print(rows[-1])
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    report |= {"changed": options.changed} if options.changed else {}
    runs.finish(report | {"repeats": options.repeats, "ends": runs.ends(options), "rows": rows}, options.output)


def measure(
    pipe: MirrorPipeline, prompts: Sequence[runs.Messages], config: GenerationConfig, methods: list[str], repeats: int
) -> tuple[dict[str, list[float]], list[int], dict[str, float]]:
    """Median seconds of each text by method, how many tokens each has, and steps of all texts in the mean repeat.

    All methods must write the same.
    """
    times: dict[str, list[list[float]]] = {method: [[] for _ in prompts] for method in methods}
    tokens, steps = [0] * len(prompts), dict.fromkeys(methods, 0.0)
    sessions = dict[str, MirrorSession]()
    for turn in range(repeats * len(prompts)):
        number, first = turn % len(prompts), turn % len(methods)
        if not number:
            _close(sessions)
            turned = turn // len(prompts) % len(methods)
            sessions = {method: pipe.session() for method in (*methods[turned:], *methods[:turned])}
        found = set[tuple[int, ...]]()
        for method in (*methods[first:], *methods[:first]):
            settings = config.with_overrides({"method": method})
            text = sessions[method].generate(messages=prompts[number], config=settings)
            steps[method] += text.stats.steps / repeats
            times[method][number].append(text.num_tokens / text.stats.tokens_per_second)
            found.add(tuple(text.token_ids))
            tokens[number] = text.num_tokens
        if len(found) > 1:
            raise SystemExit(f"the methods differ in the text of prompt {number}")
    _close(sessions)
    return {method: [median(one) for one in texts] for method, texts in times.items()}, tokens, steps


def _close(sessions: dict[str, MirrorSession]) -> None:
    for session in sessions.values():
        session.close()


def compared(seconds: dict[str, list[float]], tokens: Sequence[int]) -> dict[str, Any]:
    """Speeds over plain decoding; `auto` over the best single method and over plain, with intervals."""
    drawn, texts = random.Random(0), range(len(tokens))

    def gain(over: str, of: str, chosen: Sequence[int]) -> float:
        return sum(seconds[over][text] for text in chosen) / sum(seconds[of][text] for text in chosen)

    best = max((method for method in seconds if method != _OWN), key=lambda method: gain("plain", method, texts))
    report: dict[str, Any] = {method: round(gain("plain", method, texts), 3) for method in seconds} | {"best": best}
    draws = [drawn.choices(texts, k=len(texts)) for _ in range(_NUM_DRAWN)]
    for name, over in (("over_best", best), ("over_plain", "plain")):
        found = sorted(gain(over, _OWN, chosen) for chosen in draws)
        middle, (low, high) = gain(over, _OWN, texts), (found[int(share * _NUM_DRAWN)] for share in (0.025, 0.975))
        ends = [round(end, 3) for end in widened(low, middle, high, [len(texts)])]
        report |= {name: round(middle, 3), f"{name}_interval": ends}
    return report | {"plain_tokens_per_second": round(sum(tokens) / sum(seconds["plain"]), 2)}


if __name__ == "__main__":
    main()
