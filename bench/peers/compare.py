"""Our runtime against openvino-genai and onnxruntime-genai: the same weights, prompts, tokens and cores, in one run.

    python bench/peers/compare.py CACHE plan.json --prompts samples/storyteller/prompts.jsonl --output peers.json

`plan.json` is a list of contestants: `{"name", "runtime", "model", "draft", "options"}`, paths as `prepare.py` and
`mirrorsd export` made them. Every contestant is a process of its own (`worker.py`) that waits while another one works; they take
turns prompt by prompt. Tokens per second include the prompt. Texts are compared, and differences are reported.

Owns: the processes, the order, medians and the table. Does not own: exports, decoding.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mirrorsd.cli.machine import describe_machine, installed_versions
from mirrorsd.cli.prompt_file import Question, read_questions
from mirrorsd.runtime.tokenization import BundleTokenizer

HERE = Path(__file__).resolve().parent
PEERS = ("openvino-genai", "onnxruntime-genai")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder that prepare.py filled")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a bundle, for its tokenizer and chat template")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--label", default="")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    tokenizer = BundleTokenizer(options.tokenizer)
    questions = choose(read_questions(options.prompts), options.per_category)
    prompts = {q.question_id: tokenizer.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in questions}
    contestants = [Contestant(options.cache.resolve(), entry, options.threads) for entry in plan]
    for contestant in contestants:
        contestant.wait_until_ready()
    idle_share = measure(contestants, prompts, options.tokens, options.repeats)
    for contestant in contestants:
        contestant.close()
    report = {"label": options.label, "prompts": list(prompts), "tokens": options.tokens, "repeats": options.repeats}
    report |= {"threads": options.threads, "cores_used_by_others": round(idle_share, 3)}
    report |= {"machine": describe_machine(), "versions": installed_versions() | peer_versions(options.cache)}
    report["rows"] = [row(contestant, contestants, options.tokens) for contestant in contestants]
    print_table(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def choose(questions: Sequence[Question], per_category: int) -> list[Question]:
    """The last ones of every category."""
    categories = dict.fromkeys(question.category for question in questions)
    return [q for name in categories for q in [q for q in questions if q.category == name][-per_category:]]


def measure(
    contestants: Sequence[Contestant], prompts: dict[str, list[int]], num_tokens: int, num_repeats: int
) -> float:
    """Let them take turns, who goes first rotating; returns how many cores other processes used meanwhile."""
    first = next(iter(prompts.values()))
    for contestant in contestants:
        contestant.decode(first, num_tokens)
    before, started = busy_seconds(), os.times()
    own = cpu_of_children(contestants)
    for repeat in range(num_repeats):
        for number, (name, ids) in enumerate(prompts.items()):
            shift = (repeat + number) % len(contestants)
            for contestant in (*contestants[shift:], *contestants[:shift]):
                contestant.answers.setdefault(name, []).append(contestant.decode(ids, num_tokens))
    ended = os.times()
    others = busy_seconds() - before - (cpu_of_children(contestants) - own)
    return max(0.0, others) / (ended.elapsed - started.elapsed)


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


def row(contestant: Contestant, contestants: Sequence[Contestant], num_tokens: int) -> dict[str, Any]:
    """Speed: mean over the prompts of the median over repeats. Texts: against the first contestant's."""
    speeds = [median(num_tokens / answer["seconds"] for answer in answers) for answers in contestant.answers.values()]
    passes = [answer["passes"] for answers in contestant.answers.values() for answer in answers]
    texts = [
        shared_start(answers[0]["ids"], contestants[0].answers[name][0]["ids"])
        for name, answers in contestant.answers.items()
    ]
    return {
        "name": contestant.name,
        "runtime": contestant.runtime,
        "tokens_per_second": round(fmean(speeds), 2),
        "lowest_and_highest": [round(min(speeds), 2), round(max(speeds), 2)],
        "tokens_per_pass": round(num_tokens / fmean(passes), 3) if None not in passes else None,
        "same_text": sum(length == num_tokens for length in texts),
        "first_difference_at": [length for length in texts if length < num_tokens],
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
    print(f"{report['label']}: {num_prompts} prompts, {report['tokens']} tokens, {report['threads']} threads")
    print(f"{'':34s}{'tokens/s':>10s}{'per pass':>10s}  texts equal to the first one's")
    for found in report["rows"]:
        per_pass = "-" if found["tokens_per_pass"] is None else f"{found['tokens_per_pass']:.2f}"
        print(
            f"{found['name']:34s}{found['tokens_per_second']:10.1f}{per_pass:>10s}  "
            f"{found['same_text']} of {num_prompts} {found['first_difference_at'] or ''}"
        )
    print(f"other processes used {report['cores_used_by_others']:.2f} cores meanwhile")


if __name__ == "__main__":
    main()
