"""Do all methods give the same token ids? Greedy and sampled, with and without equal row counts.

    python bench/claims/exactness.py storyteller.mirror --prompts samples/storyteller/prompts.jsonl

Where the target is not batch-invariant (docs/exactness.md), a pass over 8 rows rounds differently from a pass over 1,
and a near tie may flip there; with `pad_rows_to` all passes have as many rows, and the ids must always be the same.
Texts go on past their end: there are more tokens to compare.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.cli.input.prompt_file import Question, read_questions, spread
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.names import Method

METHODS: tuple[Method, ...] = ("plain", "serial", "mirror", "auto")
SEEDS = (1, 2, 3, 4, 5)


def main() -> None:
    """Run all settings, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="how many prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--pad-rows-to", type=int, nargs="+", default=[0, 8], help="settings to try, in turn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    questions = spread(read_questions(options.prompts), options.count)
    greedy = GenerationConfig(max_new_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    settings = {"greedy": [greedy], "sampled": [greedy.with_overrides(sampling(seed)) for seed in SEEDS]}
    report: dict[str, Any] = {"bundle": options.bundle.name, "prompts": len(questions), "tokens": options.tokens}
    report |= {"ends": "ignored", "methods": METHODS}
    report |= {"device_map": options.device_map, "machine": describe_machine(), "versions": installed_versions()}
    report["results"] = []
    for padding in options.pad_rows_to:
        with MirrorPipeline.load(
            options.bundle, device_map=options.device_map, speculation={"pad_rows_to": padding}
        ) as pipe:
            for name, configs in settings.items():
                result = check(pipe, questions, configs)
                report["results"].append({"setting": name, "pad_rows_to": padding, **result})
                print(json.dumps(report["results"][-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def sampling(seed: int) -> dict[str, Any]:
    """The sampled setting: T = 0.8, top-p 0.95."""
    return {"temperature": 0.8, "top_p": 0.95, "seed": seed}


def check(pipe: MirrorPipeline, questions: Sequence[Question], configs: Sequence[GenerationConfig]) -> dict[str, Any]:
    """Compare the methods on every prompt and configuration."""
    differences = []
    num_texts = num_near_ties = 0
    for question in questions:
        messages = [{"role": "user", "content": question.turns[0]}]
        for config in configs:
            results = {name: pipe.generate(messages=messages, config=config, method=name) for name in METHODS}
            num_texts += 1
            plain, others = results["plain"], [results[method] for method in METHODS[1:]]
            num_near_ties += plain.stats.near_ties
            wrong = [other for other in others if other.token_ids != plain.token_ids]
            differences += [describe(question, config, plain, other) for other in wrong]
    return {"texts": num_texts, "identical": not differences, "near_ties": num_near_ties, "differences": differences}


def describe(
    question: Question, config: GenerationConfig, plain: GenerationResult, other: GenerationResult
) -> dict[str, Any]:
    """Where two texts part, and whether the plain text has a near tie there."""
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    position = next((index for index, (token, rival) in pairs if token != rival), None)
    absolute = None if position is None else plain.stats.num_prompt_tokens + position
    return {
        "question_id": question.question_id,
        "seed": config.seed,
        "method": other.method,
        "position": position,
        "is_near_tie": absolute in plain.stats.near_tie_positions,
    }


if __name__ == "__main__":
    main()
