"""Speed of `auto` without any tuning, three conversations in, over that of tuned `auto`: the same texts, by turns.

    mirrorsd tune smollm2.mirror
    python bench/claims/process/learned.py smollm2.mirror --device-map cpu --output learned.json

What `mirrorsd tune` has kept for the bundle is what tuned `auto` begins with; it is an error if there is nothing.
Beside it the bundle is loaded with a cache of its own, which is empty at first: three times, for a conversation each,
which teach it what they teach. Then both decode the same questions by turns, of which none was among the conversations.
Speeds are over the time of the steps, `whole` ones over the time from the call to the last token. Texts are compared.
`plain_ratio` is the same of plain decoding, which knows nothing of either: how much two copies of the models differ.
`waited` is the share of the time that the target has waited for the draft.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mirrorsd import GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import VARIABLE, folder_of

TUNED, LEARNED = "tuned", "learned"
COLUMNS = ("temperature", "texts", TUNED, LEARNED, "ratio", "plain_ratio", "whole_ratio", "texts_that_differ")


def main() -> int:
    """Teach, measure, print and write the report."""
    parser = runs.parser(__doc__, count=8, tokens=96)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="auto")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count + options.conversations)
    taught = prompts[:: max(len(prompts) // options.conversations, 1)][: options.conversations]
    asked = [prompt for prompt in prompts if prompt not in taught]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        kept = next(iter(folder_of(options.bundle).glob("tuned-*.json")), None)
        tuned = stack.enter_context(MirrorPipeline.load(options.bundle, device_map=options.device_map))
        if kept is None or "speculation: tuned on this machine" not in tuned.placement:
            raise ConfigError(f"Nothing was tuned for {options.bundle}: run `mirrorsd tune {options.bundle}` first.")
        with cached_in(folder):
            for prompt in taught:
                teach(options, prompt)
            learned = stack.enter_context(MirrorPipeline.load(options.bundle, device_map=options.device_map))
        rows = [compared(options, {TUNED: tuned, LEARNED: learned}, asked, each) for each in options.temperatures]
        layouts = {TUNED: tuned.layout, LEARNED: learned.layout}
    runs.print_rows(rows, COLUMNS)
    header = runs.header(options.bundle, device_map=options.device_map, tokens=options.tokens, ends=runs.ends(options))
    runs.finish(header | {"conversations": len(taught), "layouts": layouts, "rows": rows}, options.output)
    return int(any(row["texts_that_differ"] for row in rows))


@contextmanager
def cached_in(folder: str) -> Iterator[None]:
    """What is kept about bundles is in this folder."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def teach(options: Namespace, prompt: runs.Messages) -> None:
    """A conversation of a run of its own: the same question, greedy and sampled."""
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        for temperature in options.temperatures:
            config = runs.seeded(runs.text_config(options, temperature), 1)
            pipe.generate(messages=prompt, config=config)


def compared(
    options: Namespace, pipes: dict[str, MirrorPipeline], prompts: Sequence[runs.Messages], temperature: float
) -> dict[str, Any]:
    """Both on every prompt, by turns; who begins alternates."""
    results: dict[str, list[GenerationResult]] = {name: [] for name in pipes}
    plain: dict[str, list[GenerationResult]] = {name: [] for name in pipes}
    for number, prompt in enumerate(prompts):
        config = runs.seeded(runs.text_config(options, temperature), number)
        for name in sorted(pipes, reverse=number % 2 == 1):
            results[name].append(pipes[name].generate(messages=prompt, config=config))
            plain[name].append(pipes[name].generate(messages=prompt, config=config, method="plain"))
    speeds = {name: runs.speed(found) for name, found in results.items()}
    of_plain = {name: runs.speed(found) for name, found in plain.items()}
    whole = {name: sum(result.stats.seconds for result in found) for name, found in results.items()}
    differ = sum(one.token_ids != two.token_ids for one, two in zip(*results.values(), strict=True))
    return {
        "temperature": temperature,
        "texts": len(prompts),
        **{name: round(speed, 2) for name, speed in speeds.items()},
        "ratio": round(speeds[LEARNED] / speeds[TUNED], 3),
        "plain_ratio": round(of_plain[LEARNED] / of_plain[TUNED], 3),
        "whole_ratio": round(whole[TUNED] / whole[LEARNED], 3),
        "texts_that_differ": differ,
        "waited": {name: round(waited(found), 4) for name, found in results.items()},
        "steps": {name: steps_of(found) for name, found in results.items()},
    }


def waited(results: Sequence[GenerationResult]) -> float:
    """The share of the steps' time in which the target has waited for the draft."""
    exposed = sum(result.stats.draft_exposed_ms * result.stats.steps for result in results)
    return exposed / sum(1e3 * result.num_tokens / result.stats.tokens_per_second for result in results)


def steps_of(results: Sequence[GenerationResult]) -> dict[str, int]:
    """How many steps each method ran."""
    found: dict[str, int] = {}
    for result in results:
        for method, count in result.stats.steps_by_method.items():
            found[method] = found.get(method, 0) + count
    return found


if __name__ == "__main__":
    sys.exit(main())
