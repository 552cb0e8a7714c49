"""Our runtime against openvino-genai, onnxruntime-genai and llama.cpp: the same weights, prompts, ends, cores, one run.

    python bench/claims/peers/compare.py CACHE BUNDLE --target scaled --precision int8 --prompts FILE.jsonl

`prepare.py` has made the peers' exports in CACHE; they are known by the checkpoints' names. llama.cpp takes part where
`--llama-cpp` names its programs. Contestants take turns
prompt by prompt, in a process per runtime and model (`mirrorsd.cli.bench.peer_worker`) that waits while another one
works. The peers draft several numbers of tokens at a time (`--drafted`), and the best of each counts. All end a text
at the same tokens, unless `--ignore-eos`. A task's speed is the tokens of its texts over their time (the median over
repeats), prompt included; a row is the mean of the tasks. Texts are compared, and differences are reported.
`--add-to` continues an earlier report.

Owns: the contestants and their order. Does not own: exports, decoding, what a row says (`table.py`).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

from mirrorsd.bench.claims.peers import table
from mirrorsd.cli.bench.llama_server import find_server
from mirrorsd.cli.bench.peers import LLAMA_CPP, Worker
from mirrorsd.cli.bench.questions import task_of
from mirrorsd.cli.input.prompt_file import Question, read_questions, spread
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.texts.tokenizer import BundleTokenizer

HERE = Path(__file__).resolve().parent
PEERS = ("openvino-genai", "onnxruntime-genai")
MOST_ATTEMPTS = 4
LONGEST_NGRAM = 3
"""Of looking up: openvino-genai's own choice, and llama.cpp's here, whose own is 12."""
QUIET_SHARE = 0.15
"""Of a core: an answer is measured again where other processes used more."""


class Limits(NamedTuple):
    """How texts end: after `most` tokens, or with one of `ends`; without any the end of text is ignored."""

    most: int
    ends: tuple[int, ...]


def start_worker(cache: Path, entry: dict[str, Any], threads: int) -> Worker:
    """Start the process of a contestant: a runtime with a model."""
    name = str(entry["runtime"])
    python = cache / "env" / "bin" / "python" if name in PEERS else Path(sys.executable)
    draft = ["--draft", entry["draft"]] if entry.get("draft") else []
    words = [name, entry["model"], "--threads", str(threads), *draft, "--options", json.dumps(entry["options"])]
    return Worker(name, python, words)


class Contestant:
    """One way to decode: a worker with settings for its texts, and what it answered, by prompt."""

    def __init__(self, entry: dict[str, Any], worker: Worker) -> None:
        self.name, self.runtime, self.worker = str(entry["name"]), str(entry["runtime"]), worker
        self.settings: dict[str, Any] = entry["settings"]
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def decode(self, ids: Sequence[int], limits: Limits) -> dict[str, Any]:
        """Decode after `ids`."""
        request = {"ids": list(ids), "most": limits.most, "ends": list(limits.ends), "settings": self.settings}
        return self.worker.decode(request)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    asked = read_prompts(options)
    ends = () if options.ignore_eos else read_bundle(options.bundle).tokens.eos_ids
    contestants, workers, versions = open_contestants(options)
    shares = measure(contestants, asked.ids, Limits(options.tokens, tuple(ends)), options.repeats)
    for worker in workers:
        worker.close()
    report = {"precision": options.precision, "prompts": list(asked.ids), "tokens": options.tokens}
    report |= {"too_long": asked.num_too_long, "bundle": options.bundle.name}
    report |= {"ends": "honoured" if ends else "ignored", "drafted": options.drafted}
    report |= {"threads": options.threads, "disturbed": [[sum(share >= QUIET_SHARE for share in shares), len(shares)]]}
    report |= {
        "machine": describe_machine(),
        "versions": installed_versions() | peer_versions(options.cache) | versions,
    }
    earlier: dict[str, Any] = {}
    if options.add_to:
        found = read_earlier(options.add_to, report["ends"])
        report["disturbed"] = found["disturbed"] + report["disturbed"]
        earlier = {row["name"]: row["seconds"] for row in found["rows"]}
    report["rows"] = [table.row(each, contestants[0], asked.tasks, earlier.get(each.name, {})) for each in contestants]
    report["best"] = table.best_of_each(report["rows"])
    table.print_table(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


class Prompts(NamedTuple):
    """What is asked: ids and task by question, and how many questions are too long for the bundle."""

    ids: dict[str, list[int]]
    tasks: dict[str, str]
    num_too_long: int


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


def read_earlier(path: Path, ends: str) -> dict[str, Any]:
    """An earlier report, to be continued.

    Raises:
        SystemExit: its texts ended otherwise.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("ends", "ignored") != ends:
        raise SystemExit(
            f"{path} was measured with the end of text {found.get('ends', 'ignored')}, this run has it {ends}"
        )
    return found


def open_contestants(options: argparse.Namespace) -> tuple[list[Contestant], list[Worker], dict[str, str]]:
    """All who take part, their processes (one per runtime, model and options of loading), llama.cpp's version."""
    workers: dict[str, Worker] = {}
    contestants = []
    for one in entries(options):
        key = json.dumps([one["runtime"], one["model"], one.get("draft"), one["options"]])
        if key not in workers:
            workers[key] = start_worker(options.cache.resolve(), one, options.threads)
        contestants.append(Contestant(one, workers[key]))
    versions: dict[str, str] = {}
    for worker in workers.values():
        found = worker.wait_until_ready()
        versions |= {f"peers: {name}": found[name] for name in found if name == LLAMA_CPP}
    return contestants, list(workers.values()), versions


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder that prepare.py filled")
    parser.add_argument("bundle", type=Path, help="our export of the same target at the same precision")
    parser.add_argument("--target", required=True, help="name of the target's checkpoint folder")
    parser.add_argument(
        "--draft", help="name of the ordinary draft's checkpoint folder; without it, plain decoding only"
    )
    parser.add_argument("--precision", required=True)
    parser.add_argument("--draft-precisions", help="of openvino-genai's draft: int8,fp32 tries both")
    parser.add_argument("--llama-cpp", help="the folder of llama.cpp's programs; without it, llama.cpp takes no part")
    parser.add_argument(
        "--drafted", default="2,4,8,12", help="tokens that the peers draft or look up at a time; '' for none"
    )
    parser.add_argument("--device-map", default=str(HERE / "both-cores.toml"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=3, help="prompts of each task that fit, spread over the file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text; the report says so")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--add-to", type=Path, help="an earlier report of the same contestants")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def entries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Who takes part. In fp32 OpenVINO is kept from bfloat16, its own choice on processors that have it."""
    exports = {name: options.cache.resolve() / name.removesuffix("-genai") for name in PEERS}
    hint = {"INFERENCE_PRECISION_HINT": "f32"} if options.precision == "fp32" else {}
    own = {"openvino-genai": hint, "onnxruntime-genai": {}}
    whole = f"{options.target}-{options.precision}"
    methods = ("plain", "serial", "auto") if options.draft else ("plain",)
    ours = {"device_map": options.device_map}
    found = [entry("mirrorsd", name, options.bundle, ours, {"method": name}) for name in methods]
    found += [entry(peer, "plain", exports[peer] / whole, own[peer], {}) for peer in PEERS]
    kinds = (options.draft_precisions or options.precision).split(",")
    for count in options.drafted.split(",") if options.draft and options.drafted else ():
        drafted = {"num_drafted": int(count)}
        looked_up = drafted | {"longest_ngram": LONGEST_NGRAM}
        target = exports["openvino-genai"] / whole
        found.append(
            entry("openvino-genai", f"prompt lookup {count}", target, hint | {"prompt_lookup": True}, looked_up)
        )
        for kind in kinds:
            small = exports["openvino-genai"] / f"{options.draft}-{kind}"
            name = f"draft {count}" + (f" in {kind}" if len(kinds) > 1 else "")
            found.append(entry("openvino-genai", name, target, hint, drafted, small))
        composite = exports["onnxruntime-genai"] / f"{whole}+{options.draft}"
        found.append(entry("onnxruntime-genai", f"draft {count}", composite, {}, drafted))
    return found + (entries_of_llama_cpp(options) if options.llama_cpp else [])


def entries_of_llama_cpp(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Its ways to decode: what it drafts with is settled as its server starts, so each has a process of its own."""
    folder = options.cache.resolve() / LLAMA_CPP
    whole, small = (folder / f"{name}-{options.precision}.gguf" for name in (options.target, options.draft))
    server = {"server": str(find_server(options.llama_cpp)), "context": read_bundle(options.bundle).target.context}
    found = [entry(LLAMA_CPP, "plain", whole, server, {})]
    for count in options.drafted.split(",") if options.draft and options.drafted else ():
        drafted = server | {"num_drafted": int(count)}
        looked_up = drafted | {"longest_ngram": min(LONGEST_NGRAM, int(count))}  # it drafts no fewer than it looks up
        found.append(entry(LLAMA_CPP, f"lookup {count}", whole, looked_up, {}))
        found.append(entry(LLAMA_CPP, f"draft {count}", whole, drafted, {}, small))
    return found


def entry(
    runtime: str, name: str, model: Path, options: dict[str, Any], settings: dict[str, Any], draft: Path | None = None
) -> dict[str, Any]:
    """One contestant: `options` are for loading the model, `settings` for each text."""
    found: dict[str, Any] = {"name": f"{runtime} {name}", "runtime": runtime, "model": str(model)}
    found |= {"options": options, "settings": settings}
    return found | ({"draft": str(draft)} if draft else {})


def choose(questions: Sequence[Question], per_task: int) -> list[Question]:
    """Some of every task, spread over its own."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(task_of(question.question_id, question.category), []).append(question)
    return [question for of_task in by_task.values() for question in spread(of_task, per_task)]


def measure(
    contestants: Sequence[Contestant], prompts: dict[str, list[int]], limits: Limits, num_repeats: int
) -> list[float]:
    """Let them take turns, who goes first rotating; returns how many cores other processes used in each turn."""
    *_, last = prompts.values()
    for contestant in contestants:
        contestant.decode(last, limits)
    shares = []
    for repeat in range(num_repeats):
        for number, (name, ids) in enumerate(prompts.items()):
            shift = (repeat + number) % len(contestants)
            for contestant in (*contestants[shift:], *contestants[:shift]):
                answer, share = undisturbed(contestants, contestant, ids, limits)
                contestant.answers.setdefault(name, []).append(answer)
                shares.append(share)
            print(f"repeat {repeat + 1} of {num_repeats}, prompt {number + 1} of {len(prompts)}", file=sys.stderr)
    return shares


def undisturbed(
    contestants: Sequence[Contestant], contestant: Contestant, ids: Sequence[int], limits: Limits
) -> tuple[dict[str, Any], float]:
    """One answer during which other processes were quiet; after a few attempts the last one counts."""
    for _ in range(MOST_ATTEMPTS):
        before, own, started = busy_seconds(), cpu_of_children(contestants), perf_counter()
        answer = contestant.decode(ids, limits)
        elapsed = perf_counter() - started
        share = (busy_seconds() - before - (cpu_of_children(contestants) - own)) / elapsed
        if share < QUIET_SHARE:
            break
        sleep(0.5)
    return answer, max(0.0, share)


def busy_seconds() -> float:
    """Seconds of processor time that this machine has used so far (Linux; 0 elsewhere)."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    ticks = [int(word) for word in stat.read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def cpu_of_children(contestants: Sequence[Contestant]) -> float:
    """Processor seconds of the contestants' processes so far, and of what they started (Linux; 0 elsewhere)."""
    sessions = {contestant.worker.pid for contestant in contestants}
    return sum(cpu_seconds(stat, sessions) for stat in Path("/proc").glob("[0-9]*/stat"))


def cpu_seconds(stat: Path, sessions: set[int]) -> float:
    """Processor seconds of a process, if it is of one of those sessions; each worker leads one."""
    try:
        words = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if int(words[3]) in sessions else 0.0


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
