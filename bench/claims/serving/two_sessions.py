"""Two conversations on one pair of devices: total throughput at once against one after the other.

    python bench/claims/serving/two_sessions.py storyteller.mirror --device-map paced-laptop --output two_sessions.json

Prompts wait in one queue for whichever session is free. `fairness` is the share of tokens of the session that got fewer
(0.5 is even). Every text must be the same either way. Reading the prompts is part of the time. Texts end at the model's
own end, unless `--ignore-eos`.
"""

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.runtime.session import MirrorSession

METHODS = ("plain", "serial", "mirror", "auto")


def main() -> None:
    """Measure every method, print and write the report."""
    parser = runs.parser(__doc__, count=12, tokens=64)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    prompts = runs.spread_prompts(options.prompts, options.count)
    rows = []
    with MirrorPipeline.load(options.bundle, device_map=options.device_map) as pipe:
        for method in options.methods.split(","):
            config = runs.text_config(options).with_overrides({"method": method})
            rows.append({"method": method, **measure(pipe, prompts, config, options.repeats)})
            runs.print_rows(rows[-1:], tuple(rows[-1]))
    report = runs.header(options.bundle, device_map=options.device_map, texts=len(prompts), tokens=options.tokens)
    report["ends"] = runs.ends(options)
    runs.finish(report | {"rows": rows}, options.output)


def measure(
    pipe: MirrorPipeline, prompts: Sequence[runs.Messages], config: GenerationConfig, repeats: int
) -> dict[str, Any]:
    """Tokens per second of both sessions together, in turn and at once; medians over repeats."""
    sessions = [pipe.session() for _ in range(2)]
    for session, messages in zip(sessions, prompts[::-1], strict=False):
        session.generate(messages=messages, config=config)
    in_turn, at_once, shares = [], [], []
    for _ in range(repeats):
        started = perf_counter()
        texts = [sessions[number % 2].generate(messages=m, config=config) for number, m in enumerate(prompts)]
        seconds = perf_counter() - started
        num_tokens = sum(result.num_tokens for result in texts)
        in_turn.append(num_tokens / seconds)
        started = perf_counter()
        again, tokens_of_each = side_by_side(sessions, prompts, config)
        at_once.append(num_tokens / (perf_counter() - started))
        shares.append(min(tokens_of_each) / num_tokens)
        if [result.token_ids for result in texts] != [result.token_ids for result in again]:
            raise SystemExit("two sessions changed each other's text")
    for session in sessions:
        session.close()
    row: dict[str, Any] = {"in_turn": round(median(in_turn), 2), "at_once": round(median(at_once), 2)}
    row |= {"gain": round(median(at_once) / median(in_turn), 4), "fairness": round(median(shares), 3)}
    stats = [result.stats for result in again]
    row["tokens_per_step"] = round(num_tokens / sum(s.steps for s in stats), 3)
    row["reuse_rate"] = round(sum(s.reuse_rate for s in stats) / len(stats), 3)
    return row


def side_by_side(
    sessions: Sequence[MirrorSession], prompts: Sequence[runs.Messages], config: GenerationConfig
) -> tuple[list[GenerationResult], list[int]]:
    """All sessions at once, a thread each that takes the next prompt when it is done; the texts, and each one's tokens.

    So both are at work to the end, however long the texts are.
    """
    waiting = deque(enumerate(prompts))
    found: dict[int, GenerationResult] = {}
    num_tokens = [0 for _ in sessions]

    def converse(index: int) -> None:
        while waiting:
            try:
                number, messages = waiting.popleft()
            except IndexError:  # the other one took the last
                return
            found[number] = sessions[index].generate(messages=messages, config=config)
            num_tokens[index] += found[number].num_tokens

    threads = [threading.Thread(target=converse, args=(index,)) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(prompts))], num_tokens


if __name__ == "__main__":
    main()
