"""Real runs over the six tasks: every method, with a streaming and an ordinary draft, interleaved on one card.

    python bench/tasks.py storyteller.mirror --ordinary plain.mirror --device-map paced-laptop --output tasks.json

`--ordinary` is a bundle of the same target whose draft has no streams (the same draft folder without its
`streams.safetensors`, exported). A task's speed is the median over its questions and repeats; `all` is the mean of the
tasks. Speed-ups are ratios of those to plain decoding in the same run.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.cli.prompt_file import Question, read_questions

STREAMING = ("plain", "serial", "mirror", "auto")
ORDINARY = ("serial", "mirror")
COLUMNS = ("setting", "task", "tokens_per_second", "over_plain", *runs.FIGURES)


def main() -> None:
    """Run, print and write the report."""
    parser = runs.parser(__doc__, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--ordinary", type=Path, help="the same target with an ordinary draft")
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--per-task", type=int, default=2, help="questions of each task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of sampled texts, which differ much from seed to seed")
    options = parser.parse_args()
    questions = first_of_each(read_questions(options.prompts), options.per_task)
    rows, is_identical = measure(options, questions)
    report = runs.header(options.bundle, device_map=options.device_map, temperature=options.temperature)
    report["seed"] = options.seed
    report |= {"questions": len(questions), "repeats": options.repeats, "tokens": options.tokens}
    runs.print_rows(rows, COLUMNS)
    print(f"identical: {'yes' if is_identical else 'no'}")
    runs.finish(report | {"identical": is_identical, "rows": rows}, options.output)


def first_of_each(questions: Sequence[Question], count: int) -> list[Question]:
    """The first `count` questions of each category."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for found in by_category.values() for question in found[:count]]


def measure(options: Namespace, questions: Sequence[Question]) -> tuple[list[dict[str, Any]], bool]:
    """Rows per setting and task, and whether all settings gave the same texts."""
    sampling = {"temperature": options.temperature, "seed": options.seed}
    config = GenerationConfig(max_new_tokens=options.tokens, ignore_eos=True, **sampling)
    found: dict[tuple[str, str], list[GenerationResult]] = {}
    texts: dict[str, set[tuple[int, ...]]] = {}
    with ExitStack() as stack:
        settings = open_settings(stack, options)
        for number, question in enumerate([questions[0], *(list(questions) * options.repeats)]):
            shift = number % len(settings)
            for name, method, pipe in (*settings[shift:], *settings[:shift]):
                seeded = config.with_overrides({"method": method, "seed": number % len(questions)})
                result = pipe.generate(messages=[{"role": "user", "content": question.turns[0]}], config=seeded)
                if number:
                    found.setdefault((name, question.category), []).append(result)
                    texts.setdefault(f"{question.question_id} {seeded.seed}", set()).add(tuple(result.token_ids))
    return sum_up([name for name, _, _ in settings], found), all(len(same) == 1 for same in texts.values())


def open_settings(stack: ExitStack, options: Namespace) -> list[tuple[str, str, MirrorPipeline]]:
    """Name, method and pipeline of every setting."""
    streaming = stack.enter_context(MirrorPipeline.load(options.bundle, device_map=options.device_map))
    settings = [(method, method, streaming) for method in STREAMING]
    if options.ordinary:
        ordinary = stack.enter_context(MirrorPipeline.load(options.ordinary, device_map=options.device_map))
        settings += [(f"{method}, ordinary draft", method, ordinary) for method in ORDINARY]
    return settings


def sum_up(names: Sequence[str], found: dict[tuple[str, str], list[GenerationResult]]) -> list[dict[str, Any]]:
    """A row per setting and task, then one per setting for all of them."""
    rows: list[dict[str, Any]] = []
    tasks = list(dict.fromkeys(task for _, task in found))
    plain = {task: runs.sum_up(found["plain", task])["tokens_per_second"] for task in tasks}
    for name in names:
        of_tasks = [{"setting": name, "task": task, **runs.sum_up(found[name, task])} for task in tasks]
        for row in of_tasks:
            row["over_plain"] = round(row["tokens_per_second"] / plain[row["task"]], 4)
        mean = {figure: round(fmean(row[figure] for row in of_tasks), 4) for figure in COLUMNS[2:]}
        rows += [*of_tasks, {"setting": name, "task": "all", **mean}]
    return rows


if __name__ == "__main__":
    main()
