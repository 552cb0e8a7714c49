"""Every method on one target: real, paced and simulated speed, tokens per step, parameters, training time; each task.

    mirrorsd tune storyteller.mirror --device-map cpu
    python bench/claims/methods.py storyteller.mirror --work WORK --per-task 2 --output methods_storyteller.json

The runs are those of `mirrorsd bench`: answers are kept in `--work`, and the same command goes on with what is missing.
The texts of the real run are recorded, and replayed at the pace of the paced card with the settings of its run. All
speeds leave the prompts out, which a replay does not have. A head that the bundle lacks is named in the report.
Exit status 1 if any method's texts differ from plain decoding's.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.cli.bench import tables
from mirrorsd.cli.bench.answers import AnswerFile, Line, answer_line
from mirrorsd.cli.bench.entrants import answer_of
from mirrorsd.cli.bench.measuring import encoder, measure
from mirrorsd.cli.bench.questions import choose
from mirrorsd.cli.bench.running import REFERENCE, Plan
from mirrorsd.cli.input.prompt_file import Question, read_questions
from mirrorsd.cli.input.requests import has_chat_template
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import Manifest, SourceModel
from mirrorsd.graphs.names import METHODS
from mirrorsd.machine.tuning.recorder import DEPTH, record_text, recording_of
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.machine.tuning.simulation import Scenario, replay
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.texts.config import HEAD_METHODS

REAL, PACED, SIMULATED = "real", "paced", "simulated"
DRAFTING = ("serial", "mirror", "auto")
SPEEDS = ("tokens_per_second", "over_plain", "interval")


class Measured(NamedTuple):
    """A run of `mirrorsd bench`: where it is kept, what it found, and the answers of its first round by method."""

    folder: Path
    found: dict[str, Any]
    lines: dict[str, list[Line]]


def main() -> int:
    """Run what is missing, replay, print and write the report."""
    parser = runs.parser(__doc__, tokens=128)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for answers and recordings")
    parser.add_argument("--device-map", default="cpu", help="the card of the real run")
    parser.add_argument("--paced-map", default="paced-laptop", help="the card of the paced and the simulated run")
    parser.add_argument("--per-task", type=int, default=2, help="questions of each task, always the same ones")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every question")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--note", default="", help="what readers should know, such as: beside other work")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    by_temperature = [measured(options, temperature) for temperature in options.temperatures]
    report = runs.header(options.bundle, device_map=options.device_map, paced_map=options.paced_map)
    report |= {"tokens": options.tokens, "ends": runs.ends(options), "repeats": options.repeats}
    report |= {"note": options.note} if options.note else {}
    for found in by_temperature:
        report |= {name: found[name] for name in ("questions", "methods", "absent", "speculation")}
    report["identical"] = all(found["identical"] for found in by_temperature)
    report["rows"] = list(chain(*(found["rows"] for found in by_temperature)))
    show(report)
    runs.finish(report, options.output)
    return 0 if report["identical"] else 1


def measured(options: Namespace, temperature: float) -> dict[str, Any]:
    """The three runs at one temperature, and what the table says of them."""
    folder = options.work / f"temperature-{temperature:g}"
    folder.mkdir(exist_ok=True)
    with opened(options, options.device_map, temperature) as (pipe, plan):
        real = bench(pipe, options.bundle, plan, folder / REAL)
        recording = recorded(pipe, plan, real.lines[REFERENCE], folder / "texts.npz")
        manifest = pipe.manifest
    with opened(options, options.paced_map, temperature) as (pipe, plan):
        paced = bench(pipe, options.bundle, plan, folder / PACED)
        simulated = simulated_lines(pipe, recording, plan, real.lines[REFERENCE])
    by_place = {REAL: real.found["rows"], PACED: paced.found["rows"]}
    by_place[SIMULATED] = tables.summarise({name: [lines] for name, lines in simulated.items()})
    plains = {name: [found.lines[REFERENCE]] for name, found in ((REFERENCE, real), (PACED, paced))}
    is_same = not tables.find_differences(plains, list(plains))
    return {
        "questions": real.found["settings"]["questions"],
        "methods": methods_of(manifest, plan),
        "absent": [name for name in METHODS if name not in plan.methods],
        "speculation": {place.folder.name: place.found["settings"]["speculation"] for place in (real, paced)},
        "identical": real.found["identical"] and paced.found["identical"] and is_same,
        "rows": joined(by_place, temperature),
    }


@contextmanager
def opened(options: Namespace, card: str, temperature: float) -> Iterator[tuple[MirrorPipeline, Plan]]:
    """The bundle on a card, and what is measured there: every method that it has the parts for."""
    with MirrorPipeline.load(options.bundle, device_map=card) as pipe:
        yield (
            pipe,
            Plan(
                model=f"{options.bundle.stem}-temperature-{temperature:g}",
                questions=choose(read_questions(options.prompts), options.per_task),
                methods=tuple(name for name in METHODS if name in pipe.methods),
                runs=options.repeats,
                temperature=temperature,
                max_tokens=options.tokens,
                ignore_eos=options.ignore_eos,
                is_raw=not has_chat_template(options.bundle),
            ),
        )


def bench(pipe: MirrorPipeline, bundle: Path, plan: Plan, folder: Path) -> Measured:
    """What `mirrorsd bench` does; answers that are there stay."""
    last = [""]

    def tell(stage: str, share: float) -> None:
        if stage != last[0]:
            print(f"{folder.parent.name}, {folder.name}: {stage}, {share:.0%}", flush=True)
        last[0] = stage

    found = measure(pipe, bundle, plan, folder, tell)
    return Measured(
        folder, found, {name: AnswerFile(folder / "run-1" / f"{name}.jsonl").lines for name in plan.methods}
    )


def recorded(pipe: MirrorPipeline, plan: Plan, lines: Sequence[Line], path: Path) -> Recording:
    """What draft, exits and heads say along these answers, turn by turn; kept in a file."""
    if path.is_file():
        return Recording.read(path)
    heads = [kind for kind in HEAD_METHODS if kind in plan.methods]
    config = GenerationConfig(temperature=plan.temperature, seed=plan.seed_of(0), use_defaults=False)
    texts: list[RecordedText] = []
    for line in lines:
        for prompt, tokens, reason in turns_of(pipe, plan, line):
            ids = np.asarray([*prompt, *tokens], dtype=np.int64)
            text = record_text(pipe.engine, ids, len(prompt), config, DEPTH, heads=heads)
            texts.append(replace(text, ends=reason == "eos"))
        print(f"recorded question {line['question_id']}", flush=True)
    recording = recording_of(pipe, texts, plan.temperature)
    recording.write(path)
    return recording


def turns_of(pipe: MirrorPipeline, plan: Plan, line: Line) -> Iterator[tuple[list[int], list[int], str]]:
    """Prompt and new tokens of every turn of an answer, as they were asked, and why it ended."""
    question = next(each for each in plan.questions if each.question_id == line["question_id"])
    encode, choice, messages = encoder(pipe, is_raw=plan.is_raw), line["choices"][0], []
    answers = zip(choice["tokens"], choice["turns"], choice["finish_reason"], strict=True)
    for text, (tokens, said, reason) in zip(question.turns, answers, strict=False):
        messages.append({"role": "user", "content": text})
        yield encode(messages), tokens, reason
        messages.append({"role": "assistant", "content": said})


def simulated_lines(
    pipe: MirrorPipeline, recording: Recording, plan: Plan, lines: Sequence[Line]
) -> dict[str, list[Line]]:
    """The same answers by every method, replayed at the pace of the card with the settings of the pipeline.

    Raises:
        ConfigError: the card has no pace.
    """
    pace = pipe.device_map.pace
    if pace is None:
        raise ConfigError(f"--paced-map is {pipe.device_map.name}, which has no [pace]; name a card that has one.")
    speculation = pipe.sampled_speculation if plan.temperature else pipe.speculation
    layers, scores = None if speculation.exits == "all" else speculation.exits, pipe.engine.known.root_scores
    found: dict[str, list[Line]] = {}
    for method in plan.methods:
        scenario = Scenario(pace=pace, speculation=speculation, method=method, layers=layers, scores=scores)
        requests = iter(replay(recording, scenario))
        found[method] = [simulated_line(line, requests) for line in lines]
    return found


def simulated_line(line: Line, requests: Iterator[Request]) -> Line:
    """An answer whose turns are the next of `requests`; the clock starts where the prompt was read."""
    question = Question(question_id=line["question_id"], category=line["category"], turns=())
    answers = []
    for tokens in line["choices"][0]["tokens"]:
        request = next(requests)
        clock = {"began": request.ledger.prefilled, "prefilled": request.ledger.prefilled}
        answers.append(answer_of(request.steps, tokens, **clock))
    return answer_line(question, answers, model_id=SIMULATED, seed=line["choices"][0]["seed"])


def joined(by_place: dict[str, list[dict[str, Any]]], temperature: float) -> list[dict[str, Any]]:
    """A row per task and method, with the speeds of all places; the texts, so the tokens, are the same in all."""
    rows = []
    for of_places in zip(*by_place.values(), strict=True):
        row: dict[str, Any] = {
            "temperature": temperature,
            "task": of_places[0]["task"],
            "method": of_places[0]["method"],
        }
        for place, of_place in zip(by_place, of_places, strict=True):
            figures = {name: of_place[f"decode_{name}"] for name in SPEEDS}
            figures |= {name: of_place[name] for name in ("tokens_per_step", "reuse_by_source")}
            row[place] = rounded(figures)
        rows.append(row)
    return rows


def rounded(value: Any) -> Any:
    """Figures with four digits behind the point, wherever they stand.

    >>> rounded({"over_plain": 1.23456, "interval": [0.5, 2.00004], "sources": {}})
    {'over_plain': 1.2346, 'interval': [0.5, 2.0], 'sources': {}}
    """
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def methods_of(manifest: Manifest, plan: Plan) -> dict[str, dict[str, Any]]:
    """What each method needs beside the target: parameters, the seconds that they were trained for, cost of a run."""
    heads = {head.kind: head for head in manifest.heads}
    found: dict[str, dict[str, Any]] = {}
    for name in plan.methods:
        source: SourceModel | None = manifest.draft.source if name in DRAFTING else None
        found[name] = {"read_share": None}
        if name in heads:
            source = heads[name].source
            found[name] = {"read_share": heads[name].read_share, "vocabulary": heads[name].vocabulary}
            found[name] |= {"guesses": heads[name].shape.length}
        found[name]["parameters"] = source.num_parameters if source else 0
        found[name]["training_seconds"] = source.training_seconds if source else 0.0
    return found


def show(report: dict[str, Any]) -> None:
    """Print the means of the tasks, and whether all is as it must be."""
    for row in report["rows"]:
        if row["task"] == tables.ALL_TASKS:
            cells = {f"{place} x": row[place]["over_plain"] for place in (REAL, PACED, SIMULATED)}
            given = {"T": row["temperature"], "method": row["method"], "tokens/step": row[REAL]["tokens_per_step"]}
            runs.print_rows([given | cells], (*given, *cells))
    for name in report["absent"]:
        print(f"{name}: not measured, as the bundle has no such head")
    print("all texts identical" if report["identical"] else "texts are NOT identical")


if __name__ == "__main__":
    sys.exit(main())
