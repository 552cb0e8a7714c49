"""Our runtime against openvino-genai and onnxruntime-genai: the same weights, prompts, tokens and cores, in one run.

    python bench/peers/compare.py CACHE BUNDLE --target scaled --precision int8 --prompts FILE.jsonl --output peers.json

`prepare.py` has made the peers' exports in CACHE; they are known by the checkpoints' names. Every contestant is a
process of its own (`worker.py`) that waits while another one works; they take turns prompt by prompt. Tokens per second
include the prompt. Texts are compared, and differences are reported. `--add-to` continues an earlier report.

Owns: the contestants, their order, medians and the table. Does not own: exports, decoding.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, sleep
from typing import Any

from mirrorsd.cli.machine import describe_machine, installed_versions
from mirrorsd.cli.prompt_file import Question, read_questions
from mirrorsd.runtime.tokenization import BundleTokenizer

HERE = Path(__file__).resolve().parent
PEERS = ("openvino-genai", "onnxruntime-genai")
MOST_ATTEMPTS = 4
LOOKED_UP = {"num_drafted": 10, "longest_ngram": 3}
"""Of openvino-genai's prompt lookup; it takes 5 tokens at a time by itself, but these texts repeat themselves."""
QUIET_SHARE = 0.15
"""Of a core: an answer is measured again where other processes used more."""


class Contestant:
    """One process of `worker.py`, and what it answered."""

    def __init__(self, cache: Path, entry: dict[str, Any], threads: int) -> None:
        self.name, self.runtime = str(entry["name"]), str(entry["runtime"])
        python = cache / "env" / "bin" / "python" if self.runtime in PEERS else Path(sys.executable)
        words = [str(python), str(HERE / "worker.py"), self.runtime, entry["model"], "--threads", str(threads)]
        words += ["--draft", entry["draft"]] if entry.get("draft") else []
        words += ["--options", json.dumps(entry.get("options", {}))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def wait_until_ready(self) -> None:
        """Block until the model is loaded."""
        self._read()

    def decode(self, ids: Sequence[int], count: int) -> dict[str, Any]:
        """Decode `count` tokens after `ids`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "count": count}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended without an answer (status {self._process.wait()}).")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    tokenizer = BundleTokenizer(options.bundle)
    questions = choose(read_questions(options.prompts), options.per_category)
    prompts = {q.question_id: tokenizer.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in questions}
    contestants = [Contestant(options.cache.resolve(), entry, options.threads) for entry in entries(options)]
    for contestant in contestants:
        contestant.wait_until_ready()
    shares = measure(contestants, prompts, options.tokens, options.repeats)
    for contestant in contestants:
        contestant.close()
    report = {"precision": options.precision, "prompts": list(prompts), "tokens": options.tokens}
    report |= {"threads": options.threads, "disturbed": [[sum(share >= QUIET_SHARE for share in shares), len(shares)]]}
    report |= {"machine": describe_machine(), "versions": installed_versions() | peer_versions(options.cache)}
    earlier: dict[str, Any] = {}
    if options.add_to:
        found = json.loads(options.add_to.read_text(encoding="utf-8"))
        report["disturbed"] = found["disturbed"] + report["disturbed"]
        earlier = {row["name"]: row["seconds"] for row in found["rows"]}
    report["rows"] = [row(each, contestants[0], options.tokens, earlier.get(each.name, {})) for each in contestants]
    print_table(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
    parser.add_argument("--drafted", default="4", help="tokens that the peers draft at a time: 3,4,5 tries all")
    parser.add_argument("--device-map", default=str(HERE / "both-cores.toml"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
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
    found = [
        entry("mirrorsd", name, options.bundle, {"method": name, "device_map": options.device_map}) for name in methods
    ]
    found += [entry(peer, "plain", exports[peer] / whole, own[peer]) for peer in PEERS]
    if options.draft:
        found.append(entry("openvino-genai", "prompt lookup", exports["openvino-genai"] / whole, hint | LOOKED_UP))
    kinds = (options.draft_precisions or options.precision).split(",")
    for count in options.drafted.split(",") if options.draft else ():
        drafted = {"num_drafted": int(count)}
        for kind in kinds:
            small = exports["openvino-genai"] / f"{options.draft}-{kind}"
            name = f"draft {count}" + (f" in {kind}" if len(kinds) > 1 else "")
            found.append(entry("openvino-genai", name, exports["openvino-genai"] / whole, hint | drafted, small))
        composite = exports["onnxruntime-genai"] / f"{whole}+{options.draft}"
        found.append(entry("onnxruntime-genai", f"draft {count}", composite, drafted))
    return found


def entry(runtime: str, name: str, model: Path, options: dict[str, Any], draft: Path | None = None) -> dict[str, Any]:
    """One contestant."""
    found = {"name": f"{runtime} {name}", "runtime": runtime, "model": str(model), "options": options}
    return found | ({"draft": str(draft)} if draft else {})


def choose(questions: Sequence[Question], per_category: int) -> list[Question]:
    """The last ones of every category."""
    categories = dict.fromkeys(question.category for question in questions)
    return [q for name in categories for q in [q for q in questions if q.category == name][-per_category:]]


def measure(
    contestants: Sequence[Contestant], prompts: dict[str, list[int]], num_tokens: int, num_repeats: int
) -> list[float]:
    """Let them take turns, who goes first rotating; returns how many cores other processes used in each turn."""
    first = next(iter(prompts.values()))
    for contestant in contestants:
        contestant.decode(first, num_tokens)
    shares = []
    for repeat in range(num_repeats):
        for number, (name, ids) in enumerate(prompts.items()):
            shift = (repeat + number) % len(contestants)
            for contestant in (*contestants[shift:], *contestants[:shift]):
                answer, share = undisturbed(contestants, contestant, ids, num_tokens)
                contestant.answers.setdefault(name, []).append(answer)
                shares.append(share)
    return shares


def undisturbed(
    contestants: Sequence[Contestant], contestant: Contestant, ids: Sequence[int], num_tokens: int
) -> tuple[dict[str, Any], float]:
    """One answer during which other processes were quiet; after a few attempts the last one counts."""
    for _ in range(MOST_ATTEMPTS):
        before, own, started = busy_seconds(), cpu_of_children(contestants), perf_counter()
        answer = contestant.decode(ids, num_tokens)
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
    """Processor seconds of the contestants' processes so far (Linux; 0 elsewhere)."""
    total = 0.0
    for contestant in contestants:
        stat = Path(f"/proc/{contestant._process.pid}/stat")
        if stat.is_file():
            words = stat.read_text(encoding="ascii").rsplit(")", 1)[1].split()
            total += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return total


def row(contestant: Contestant, first: Contestant, num_tokens: int, earlier: dict[str, list[float]]) -> dict[str, Any]:
    """Speed: mean over the prompts of the median over repeats. Texts: against the first contestant's."""
    answers = contestant.answers
    seconds = {
        name: [*earlier.get(name, []), *(round(answer["seconds"], 4) for answer in found)]
        for name, found in answers.items()
    }
    speeds = [num_tokens / median(times) for times in seconds.values()]
    passes = [answer["passes"] for found in answers.values() for answer in found]
    shared = [shared_start(found[0]["ids"], first.answers[name][0]["ids"]) for name, found in answers.items()]
    return {
        "name": contestant.name,
        "tokens_per_second": round(fmean(speeds), 2),
        "lowest_and_highest": [round(min(speeds), 2), round(max(speeds), 2)],
        "tokens_per_pass": round(num_tokens / fmean(passes), 3) if None not in passes else None,
        "same_text": sum(length == num_tokens for length in shared),
        "first_difference_at": [length for length in shared if length < num_tokens],
        "seconds": seconds,
    }


def shared_start(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens are equal.

    >>> shared_start([5, 6, 7], [5, 6, 8])
    2
    """
    pairs = enumerate(zip(ids, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(ids), len(others)))


def peer_versions(cache: Path) -> dict[str, str]:
    """What the peers' environment has installed."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
        "('openvino-genai', 'openvino', 'onnxruntime-genai', 'onnxruntime', 'optimum-intel', 'transformers')}))"
    )
    python = cache / "env" / "bin" / "python"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return {f"peers: {name}": version for name, version in json.loads(found.stdout).items()}


def print_table(report: dict[str, Any]) -> None:
    """One line per contestant."""
    num_prompts = len(report["prompts"])
    print(f"{report['precision']}: {num_prompts} prompts, {report['tokens']} tokens, {report['threads']} threads")
    print(f"{'':34s}{'tokens/s':>10s}{'per pass':>10s}  texts equal to the first one's")
    for found in report["rows"]:
        per_pass = "-" if found["tokens_per_pass"] is None else f"{found['tokens_per_pass']:.2f}"
        print(
            f"{found['name']:34s}{found['tokens_per_second']:10.1f}{per_pass:>10s}  "
            f"{found['same_text']} of {num_prompts} {found['first_difference_at'] or ''}"
        )
    print(f"turns in which other processes used the cores: {report['disturbed']}")


if __name__ == "__main__":
    main()
