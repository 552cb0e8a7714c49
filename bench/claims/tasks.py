"""Real runs over the six tasks: every method, with a streaming and an ordinary draft, interleaved on one card.

    python bench/claims/tasks.py storyteller.mirror --ordinary plain.mirror --device-map paced-laptop

`--ordinary` is a bundle of the same target whose draft has no streams (the same draft folder without its
`streams.safetensors`, exported). A task's speed is the tokens of all its texts over their time, from the end of the
target's prefill on (of several repeats of a text, the median); `all` is the mean of the tasks. Speed-ups are ratios of
those to plain decoding in the same run. Texts end at the model's own end, unless `--ignore-eos`.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from mirrorsd import GenerationResult, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.cli.input.prompt_file import Question, read_questions, spread
from mirrorsd.runtime.session import MirrorSession

STREAMING = ("plain", "serial", "mirror", "auto")
ORDINARY = ("serial", "mirror")
FIGURES = ("prefill_ms", runs.FIRST_TOKEN, "tokens_per_text", *runs.FIGURES)
COLUMNS = ("setting", "task", "tokens_per_second", "over_plain", *FIGURES)


def main() -> None:
    """Run, print and write the report."""
    parser = runs.parser(__doc__, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--ordinary", type=Path, help="the same target with an ordinary draft")
    parser.add_argument("--device-map", default="paced-laptop")
    parser.add_argument("--per-task", type=int, default=3, help="questions of each task, spread over the file")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of sampled texts, which differ much from seed to seed")
    options = parser.parse_args()
    questions = spread_over_tasks(read_questions(options.prompts), options.per_task)
    rows, is_identical = measure(options, questions)
    report = runs.header(options.bundle, device_map=options.device_map, temperature=options.temperature)
    report |= {"seed": options.seed, "ends": runs.ends(options), "questions": len(questions)}
    report |= {"repeats": options.repeats, "tokens": options.tokens}
    runs.print_rows(rows, COLUMNS)
    print(f"identical: {'yes' if is_identical else 'no'}")
    runs.finish(report | {"identical": is_identical, "rows": rows}, options.output)


def spread_over_tasks(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` questions of each category, spread over its own."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for found in by_category.values() for question in spread(found, count)]


def measure(options: Namespace, questions: Sequence[Question]) -> tuple[list[dict[str, Any]], bool]:
    """Rows per setting and task, and whether all settings gave the same texts."""
    config = runs.text_config(options, options.temperature)
    found: dict[tuple[str, str], list[GenerationResult]] = {}
    texts: dict[str, set[tuple[int, ...]]] = {}
    with ExitStack() as stack:
        settings = open_settings(stack, options)
        for number, question in enumerate([questions[-1], *(list(questions) * options.repeats)]):
            shift = number % len(settings)
            seeded = runs.seeded(config, options.seed + number % len(questions))
            for name, method, session in (*settings[shift:], *settings[:shift]):
                asked = [{"role": "user", "content": question.turns[0]}]
                result = session.generate(messages=asked, config=seeded.with_overrides({"method": method}))
                if number:
                    found.setdefault((name, question.category), []).append(result)
                    texts.setdefault(question.question_id, set()).add(tuple(result.token_ids))
    return sum_up([name for name, _, _ in settings], found), all(len(same) == 1 for same in texts.values())


def open_settings(stack: ExitStack, options: Namespace) -> list[tuple[str, str, MirrorSession]]:
    """Name, method and session of every setting; none finds a prompt that another one has read."""
    streaming = stack.enter_context(MirrorPipeline.load(options.bundle, device_map=options.device_map))
    settings = [(method, method, streaming.session()) for method in STREAMING]
    if options.ordinary:
        ordinary = stack.enter_context(MirrorPipeline.load(options.ordinary, device_map=options.device_map))
        settings += [(f"{method}, ordinary draft", method, ordinary.session()) for method in ORDINARY]
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
