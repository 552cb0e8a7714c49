"""Our runtime against openvino-genai, onnxruntime-genai and llama.cpp: the same weights, prompts, ends, cores, one run.

    python bench/claims/peers/compare.py CACHE BUNDLE --target scaled --precision int8 --prompts FILE.jsonl

`prepare.py` has made the peers' exports in CACHE; they are known by the checkpoints' names. llama.cpp takes part where
`--llama-cpp` names its programs. Contestants take turns
prompt by prompt, in a process per runtime and model (`mirrorsd.cli.bench.peer_worker`) that waits while another one
works. The peers draft several numbers of tokens at a time (`--drafted`), and the best of each counts. All end a text
at the same tokens, unless `--ignore-eos`. A task's speed is the tokens of its texts over their time (the median over
repeats), prompt included; a row is the mean of the tasks. Texts are compared, and differences are reported. With
`--journal` every answer is kept, and the next run goes on where this one was ended, by `--minutes` or otherwise.

Owns: which prompts are asked, and the report. Does not own: who takes part (`ways.py`), their turns (`turns.py`),
exports, decoding, what a row says (`table.py`).
"""

import argparse
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mirrorsd.bench.claims.peers import table
from mirrorsd.bench.claims.peers.journal import Journal
from mirrorsd.bench.claims.peers.turns import QUIET_SHARE, Company, Limits, measure
from mirrorsd.bench.claims.peers.ways import entries
from mirrorsd.cli.bench.questions import task_of
from mirrorsd.cli.input.prompt_file import Question, read_questions, spread
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.texts.tokenizer import BundleTokenizer

HERE = Path(__file__).resolve().parent
QUALITY = "quality.json"
"""In the cache: what `prepare.py` found of the peers' models."""


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    asked = read_prompts(options)
    ends = () if options.ignore_eos else read_bundle(options.bundle).tokens.eos_ids
    report = head_of(options, asked)
    journal = Journal(options.journal, report)
    with Company(entries(options), options.cache, options.threads) as company:
        limits = Limits(options.tokens, tuple(ends), options.temperature, options.seed)
        measure(company, asked.ids, limits, journal, options.repeats, options.minutes)
        report |= {"refused": company.refused, "drafted": options.drafted}
        names = {one.name: one.runtime for one in company.contestants}
        versions = installed_versions() | peer_versions(options.cache) | company.versions
    report |= {"machine": describe_machine(), "versions": versions}
    report |= results_of(journal, names, asked)
    report["quality"] = quality_of(options)
    table.print_table(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


class Prompts(NamedTuple):
    """What is asked: ids and task by question, and how many questions are too long for the bundle."""

    ids: dict[str, list[int]]
    tasks: dict[str, str]
    num_too_long: int


def head_of(options: argparse.Namespace, asked: Prompts) -> dict[str, Any]:
    """What is measured: only with the same are answers put together."""
    found = {"precision": options.precision, "prompts": list(asked.ids), "tokens": options.tokens}
    found |= {"too_long": asked.num_too_long, "bundle": options.bundle.name}
    found |= {"ends": "ignored" if options.ignore_eos else "honoured", "threads": options.threads}
    return found | {"temperature": options.temperature, "seed": options.seed, "processor": processor()}


def processor() -> str:
    """The name of this machine's."""
    return str(describe_machine().get("processor", "not noted"))


def results_of(journal: Journal, names: dict[str, str], asked: Prompts) -> dict[str, Any]:
    """Rows of the prompts that all have answered, and what they say together."""
    answered = [name for name in asked.ids if all(journal.of(one, name) for one in names)]
    if not answered:
        raise SystemExit("no prompt was answered by all in this time")
    done = [
        table.Done(name, runtime, {prompt: journal.of(name, prompt) for prompt in answered})
        for name, runtime in names.items()
    ]
    rows = [table.row(one, done[0], asked.tasks) for one in done]
    shares = [answer.get("share", 0.0) for one in done for found in one.answers.values() for answer in found]
    found = {"answered": answered, "rows": rows, "best": table.best_of_each(rows)}
    found["over"] = table.over_peers(done, rows, {name: asked.tasks[name] for name in answered})
    return found | {"disturbed": [[sum(share >= QUIET_SHARE for share in shares), len(shares)]]}


def read_prompts(options: argparse.Namespace) -> Prompts:
    """The chosen questions' first turns, in the target's chat form. What does not fit is left out for all alike."""
    tokenizer = BundleTokenizer(options.bundle)
    room = read_bundle(options.bundle).target.context - options.tokens
    questions = {str(question.question_id): question for question in read_questions(options.prompts)}
    ids = {name: tokenizer.encode_chat(first_turn(question)) for name, question in questions.items()}
    fitting = [question for name, question in questions.items() if len(ids[name]) <= room]
    chosen = {str(question.question_id): question for question in choose(fitting, options.per_task)}
    tasks = {name: task_of(question.question_id, question.category) for name, question in chosen.items()}
    return Prompts({name: ids[name] for name in chosen}, tasks, len(questions) - len(fitting))


def first_turn(question: Question) -> list[dict[str, str]]:
    """The conversation that a contestant answers."""
    return [{"role": "user", "content": question.turns[0]}]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments(__doc__, tokens=128, per_task=3)
    parser.add_argument(
        "--draft", help="name of the ordinary draft's checkpoint folder; without it, peers decode plainly and look up"
    )
    parser.add_argument("--draft-precisions", help="of openvino-genai's draft: int8,fp32 tries both")
    parser.add_argument(
        "--drafted", default="2,4,8,12", help="tokens that the peers draft or look up at a time; '' for none"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of sampled texts; a runtime's own noise comes of it")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text; the report says so")
    return parser.parse_args()


def arguments(description: str | None, *, tokens: int, per_task: int) -> argparse.ArgumentParser:
    """The options of `users.py`, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder that prepare.py filled")
    parser.add_argument("bundle", type=Path, help="our export of the same target at the same precision")
    parser.add_argument("--target", required=True, help="name of the target's checkpoint folder, or of its GGUF file")
    parser.add_argument("--precision", required=True)
    parser.add_argument("--llama-cpp", help="the folder of llama.cpp's programs; without it, llama.cpp takes no part")
    parser.add_argument("--device-map", default=str(HERE / "both-cores.toml"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--per-task", type=int, default=per_task, help="prompts of each task that fit, spread over the file"
    )
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--journal", type=Path, help="keep every answer here, and go on from what it holds")
    parser.add_argument("--output", type=Path)
    return parser


def choose(questions: Sequence[Question], per_task: int) -> list[Question]:
    """Some of every task, spread over its own, the tasks by turns: an ended run has asked something of each."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(task_of(question.question_id, question.category), []).append(question)
    chosen = [spread(of_task, per_task) for of_task in by_task.values()]
    return [found[number] for number in range(per_task) for found in chosen if number < len(found)]


def quality_of(options: argparse.Namespace) -> dict[str, Any]:
    """Best tokens kept and the rise of perplexity, by runtime: ours is what the export measured."""
    found: dict[str, Any] = {}
    own = read_bundle(options.bundle).quality
    if own is not None:
        rise = own.perplexity / own.reference_perplexity - 1
        found["mirrorsd"] = {"kept": round(own.top1_agreement, 4), "perplexity": round(rise, 4), "text": own.text}
    path = options.cache / QUALITY
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for folder, runtime in (("openvino", "openvino-genai"), ("onnxruntime", "onnxruntime-genai"), ("llama.cpp",) * 2):
        name = f"{folder}/{options.target}-{options.precision}"
        if name in known:
            found[runtime] = known[name]
    return found


def peer_versions(cache: Path) -> dict[str, str]:
    """What the peers' environment has installed."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
        "('openvino-genai', 'openvino', 'onnxruntime-genai', 'onnxruntime', 'optimum-intel', 'transformers')}))"
    )
    python = cache / "env" / "bin" / "python"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return {f"peers: {name}": version for name, version in json.loads(found.stdout).items()}


if __name__ == "__main__":
    main()
