"""Two conversations on one pair of devices: total throughput at once against one after the other.

    python bench/two_sessions.py storyteller.mirror --device-map paced-laptop --output two_sessions.json

Both sessions get the same number of texts. `fairness` is the share of the slower session's tokens while both were at
work (0.5 is even). Every text must be the same either way.
"""

import threading
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs

METHODS = ("plain", "serial", "mirror", "auto")


def main() -> None:
    """Measure every method, print and write the report."""
    parser = runs.parser(__doc__, count=4, tokens=64)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    pairs = (prompts[0::2], prompts[1::2])
    rows = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        for method in options.methods.split(","):
            config = GenerationConfig(max_new_tokens=options.tokens, temperature=0.0, ignore_eos=True, method=method)
            rows.append({"method": method, **measure(pipe, pairs, config, options.repeats)})
            runs.print_rows(rows[-1:], tuple(rows[-1]))
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    runs.finish(report | {"rows": rows}, options.output)


def measure(
    pipe: MirrorPipeline, pairs: tuple[list[runs.Messages], ...], config: GenerationConfig, repeats: int
) -> dict[str, Any]:
    """Tokens per second of both sessions together, in turn and at once; medians over repeats."""
    sessions = [pipe.session() for _ in pairs]
    for session, prompts in zip(sessions, pairs, strict=True):
        session.generate(messages=prompts[0], config=config)
    in_turn, at_once, shares = [], [], []
    for _ in range(repeats):
        started = perf_counter()
        texts = [[s.generate(messages=m, config=config) for m in p] for s, p in zip(sessions, pairs, strict=True)]
        seconds = perf_counter() - started
        num_tokens = sum(result.num_tokens for results in texts for result in results)
        in_turn.append(num_tokens / seconds)
        started = perf_counter()
        again, ends = side_by_side(sessions, pairs, config)
        at_once.append(num_tokens / (perf_counter() - started))
        shares.append(min(ends) / sum(ends))
        if [[r.token_ids for r in t] for t in texts] != [[r.token_ids for r in t] for t in again]:
            raise SystemExit("two sessions changed each other's text")
    for session in sessions:
        session.close()
    row: dict[str, Any] = {"in_turn": round(median(in_turn), 2), "at_once": round(median(at_once), 2)}
    row |= {"gain": round(median(at_once) / median(in_turn), 4), "fairness": round(median(shares), 3)}
    stats = [result.stats for results in again for result in results]
    row["tokens_per_step"] = round(sum(r.num_tokens for t in again for r in t) / sum(s.steps for s in stats), 3)
    row["reuse_rate"] = round(sum(s.reuse_rate for s in stats) / len(stats), 3)
    return row


def side_by_side(
    sessions: list[Any], pairs: tuple[list[runs.Messages], ...], config: GenerationConfig
) -> tuple[list[list[GenerationResult]], list[float]]:
    """All sessions at once, a thread each; the texts, and how long each session took."""
    found: list[list[GenerationResult]] = [[] for _ in sessions]
    ends = [0.0 for _ in sessions]
    started = perf_counter()

    def converse(index: int) -> None:
        for messages in pairs[index]:
            found[index].append(sessions[index].generate(messages=messages, config=config))
        ends[index] = perf_counter() - started

    threads = [threading.Thread(target=converse, args=(index,)) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, ends


if __name__ == "__main__":
    main()
