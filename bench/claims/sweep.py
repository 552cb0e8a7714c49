"""`auto` after `mirrorsd tune`, against the best of {plain, serial, mirror} x layouts over a small grid of settings.

    mirrorsd tune scaled.mirror --device-map cpu
    python bench/claims/sweep.py scaled.mirror --device-map cpu --work sweep.jsonl --output sweep.json
    python bench/claims/sweep.py scaled.mirror --device-map cpu --work sweep1.jsonl --temperature 1

All take turns on every prompt; who comes first rotates. A task's speed is the tokens of its texts over their time, from
the end of the target's prefill on (the median over repeats); a row is the mean of the tasks. Texts end at the model's
own end, unless `--ignore-eos`.
`--seconds 50` stops after so long, between two prompts; the same command goes on where it stopped, as what is done
is kept in `--work`. A report is made once all is done.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.cli.input.prompt_file import read_questions, spread
from mirrorsd.devices.inventory import choose_device_map
from mirrorsd.runtime.reporting.stats import GenerationStats
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.texts.speculation import resolve_speculation

SERIAL = ((3, 1), (9, 2), (12, 3))
MIRROR = ((9, 2),)
"""Window length and passes; these windows are not cut. The tuned ones, which are, compete beside them."""
KEPT = (
    "tokens_per_second",
    "seconds",
    "prefill_ms",
    runs.FIRST_TOKEN,
    "steps",
    "tokens_per_step",
    "draft_exposed_ms",
    "reuse_by_source",
    "repeat_rate",
)

Answer = dict[str, Any]
"""One text by one arm: `arm`, `prompt`, `task`, `repeat`, `kept` (of its statistics) and `ids`."""


class Arm(NamedTuple):
    """One way to decode; without a `layout`, in the tuned one with the tuned settings."""

    layout: str
    method: str
    gamma: int = 0
    passes: int = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        if not self.layout:
            return self.method if self.method == "auto" else f"tuned {self.method}"
        window = f", gamma {self.gamma}, {self.passes} passes" if self.gamma else ""
        return f"{self.layout} {self.method}{window}"


def main() -> None:
    """Run what is still to do, then print and write the report."""
    parser = runs.parser(__doc__, count=18, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--work", type=Path, required=True, help="what is done so far, a line per text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; go on later")
    options = parser.parse_args()
    layouts = choose_device_map(options.device_map).device_map.layouts
    arms = arms_of(layouts)
    units = [(repeat, prompt) for repeat in range(options.repeats) for prompt in range(options.count)]
    missing = [unit for unit in units if unit not in finished(read(options.work), arms)]
    layout = run(options, arms, missing) if missing else ""
    answers = read(options.work)
    left = len(units) - len(finished(answers, arms))
    if left:
        print(f"{left} of {len(units)} rounds are left: run the same command again")
        return
    report = runs.header(options.bundle, device_map=options.device_map, tokens=options.tokens)
    report |= {"temperature": options.temperature, "ends": runs.ends(options), "prompts": options.count}
    report["repeats"] = options.repeats
    report |= summary(answers, arms, layouts) | {"tuned_layout": layout or answers[0]["tuned_layout"]}
    columns = ("arm", "tokens_per_second", runs.FIRST_TOKEN, "tokens_per_step", "draft_exposed_ms", "reuse")
    runs.print_rows(report["rows"], columns)
    print(f"best: {report['best']}")
    for name in ("auto_to_best", "auto_to_plain"):
        print(f"{name}: {report[name]:.3f}")
    runs.finish(report, options.output)


def arms_of(layouts: Sequence[str]) -> list[Arm]:
    """All that compete: plain decoding, and both kinds of speculation over the grid, in every layout; and `auto`."""
    arms = [Arm(layout, "plain") for layout in layouts]
    arms += [Arm(layout, "serial", *setting) for layout in layouts for setting in SERIAL]
    arms += [Arm(layout, "mirror", *setting) for layout in layouts for setting in MIRROR]
    return [*arms, *(Arm("", method) for method in ("serial", "mirror", "auto"))]


def run(options: argparse.Namespace, arms: Sequence[Arm], units: Sequence[tuple[int, int]]) -> str:
    """Decode round by round until the time is up; the layout that `auto` runs in."""
    ends = perf_counter() + options.seconds
    questions = runs.enough(spread(read_questions(options.prompts), options.count), options)
    prompts = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    config = runs.text_config(options, options.temperature)
    with ExitStack() as stack, options.work.open("a", encoding="utf-8") as work:
        sessions, layout = open_sessions(stack, options, arms)
        for arm, session in sessions.items():
            short = config.with_overrides({"method": arm.method, "max_new_tokens": 8})
            session.generate(messages=prompts[-1], config=short)
        for repeat, number in units:
            shift = (repeat * options.count + number) % len(arms)
            seeded = runs.seeded(config, number)
            for arm in (*arms[shift:], *arms[:shift]):
                chosen = seeded.with_overrides({"method": arm.method})
                result = sessions[arm].generate(messages=prompts[number], config=chosen)
                answer = {"arm": arm.name, "prompt": number, "task": questions[number].category, "repeat": repeat}
                answer |= {"tuned_layout": layout, "kept": kept(result.stats), "ids": list(result.token_ids)}
                work.write(json.dumps(answer) + "\n")
            work.flush()
            if perf_counter() > ends:
                break
    return layout


def open_sessions(
    stack: ExitStack, options: argparse.Namespace, arms: Sequence[Arm]
) -> tuple[dict[Arm, MirrorSession], str]:
    """A session per arm on a pipeline per layout, and one on the tuned pipeline; the tuned pipeline's layout."""
    tuned = stack.enter_context(MirrorPipeline.load(options.bundle, device_map=options.device_map))
    if "speculation: tuned on this machine" not in tuned.placement:
        raise SystemExit(f"run `mirrorsd tune {options.bundle} --device-map {options.device_map}` first")
    pipes = {  # one pipeline per layout: two of the same differ by 10 %, wherever their memory came to lie
        layout: tuned
        if layout == tuned.layout
        else stack.enter_context(
            MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=False, layout=layout)
        )
        for layout in dict.fromkeys(arm.layout for arm in arms if arm.layout)
    }
    for pipe in pipes.values():
        pipe.engine.known.root_scores = tuned.engine.known.root_scores
    sessions = {}
    for arm in arms:
        pipe = pipes.get(arm.layout, tuned)
        window = {"gamma": arm.gamma, "passes": arm.passes, "window": "full"} if arm.gamma else {}
        sessions[arm] = pipe.session(resolve_speculation(pipe.speculation, window) if arm.layout else None)
    return sessions, tuned.layout


def kept(stats: GenerationStats) -> dict[str, Any]:
    """The figures of a text that the report needs."""
    return {name: getattr(stats, name) for name in KEPT} | {"steps_by_method": stats.steps_by_method}


def read(work: Path) -> list[Answer]:
    """All texts that are done; a line that was cut off does not count."""

    def whole_lines() -> Iterator[Answer]:
        for line in work.read_text(encoding="utf-8").splitlines() if work.is_file() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    return list(whole_lines())


def finished(answers: Sequence[Answer], arms: Sequence[Arm]) -> set[tuple[int, int]]:
    """Repeats and prompts that every arm has done."""
    done: dict[tuple[int, int], set[str]] = {}
    for answer in answers:
        done.setdefault((answer["repeat"], answer["prompt"]), set()).add(answer["arm"])
    return {unit for unit, names in done.items() if names >= {arm.name for arm in arms}}


def summary(answers: Sequence[Answer], arms: Sequence[Arm], layouts: Sequence[str]) -> dict[str, Any]:
    """Rows, the best arm, and `auto` over the best and over the fastest plain decoding."""
    rows = [row(arm, [answer for answer in answers if answer["arm"] == arm.name]) for arm in arms]
    speeds = {found["arm"]: found["tokens_per_second"] for found in rows}
    auto = speeds.pop("auto")
    best = max(speeds, key=lambda name: speeds[name])
    plain = max(speeds[Arm(layout, "plain").name] for layout in layouts)
    found = {"rows": rows, "best": best, "auto_to_best": round(auto / speeds[best], 4)}
    return found | {"auto_to_plain": round(auto / plain, 4), "different_texts": different_texts(answers)}


def row(arm: Arm, answers: Sequence[Answer]) -> dict[str, Any]:
    """One arm's figures: speed as the mean of the tasks, the others weighted by steps."""
    tasks = dict.fromkeys(answer["task"] for answer in answers)
    by_task = {task: speed([answer for answer in answers if answer["task"] == task]) for task in tasks}
    found: dict[str, Any] = {"arm": arm.name, "tokens_per_second": round(fmean(by_task.values()), 2)}
    found["by_task"] = {task: round(per_second, 2) for task, per_second in by_task.items()}
    figures = [answer["kept"] for answer in answers]
    for name in ("prefill_ms", runs.FIRST_TOKEN):
        found[name] = round(median(figure[name] for figure in figures), 3)
    steps = [figure["steps"] for figure in figures]
    for name in ("tokens_per_step", "draft_exposed_ms", "repeat_rate"):
        found[name] = round(fmean((figure[name] for figure in figures), steps), 4)
    sources = sorted({source for figure in figures for source in figure["reuse_by_source"]})
    reuse = {source: fmean((f["reuse_by_source"].get(source, 0.0) for f in figures), steps) for source in sources}
    found["reuse"] = {source: round(share, 4) for source, share in reuse.items()}
    methods = sorted({method for figure in figures for method in figure["steps_by_method"]})
    return found | {"steps": {m: sum(f["steps_by_method"].get(m, 0) for f in figures) for m in methods}}


def speed(answers: Sequence[Answer]) -> float:
    """Tokens of several texts over the time that they took, each with the median over its repeats."""
    times: dict[int, list[float]] = {}
    num_tokens = {}
    for answer in answers:
        num_tokens[answer["prompt"]] = len(answer["ids"])
        times.setdefault(answer["prompt"], []).append(len(answer["ids"]) / answer["kept"]["tokens_per_second"])
    return sum(num_tokens.values()) / sum(median(seconds) for seconds in times.values())


def different_texts(answers: Sequence[Answer]) -> int:
    """How many texts are not what the first arm said: near ties that passes of several rows round differently."""
    reference: dict[int, list[int]] = {}
    return sum(reference.setdefault(answer["prompt"], answer["ids"]) != answer["ids"] for answer in answers)


if __name__ == "__main__":
    main()
