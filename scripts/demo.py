"""From a fresh clone to two devices writing one story: installs, exports the sample pair, generates, compares.

python3 scripts/demo.py [--prompt TEXT] [--tokens N] [--device-map NAME]

Exit status: 0 if plain, serial and mirror decoding gave the same tokens, 1 if they differed, else that of the
command that failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from environment import ROOT, SetupError, ensure_environment, environment_command, run_here

SAMPLE = Path("samples") / "storyteller"
WORKPLACE = ROOT / ".demo"
BUNDLE = Path(".demo") / "storyteller.mirror"
METHODS = ("plain", "serial", "mirror")
PROMPT = "Once upon a time there was a little fox who lived at the edge of a dark forest."
COLUMNS = ("tokens_per_second", "tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms", "overlap")


def main() -> int:
    """Run the steps in order and stop at the first that fails."""
    options = parse_arguments(sys.argv[1:])
    started = time.perf_counter()
    try:
        ensure_environment({"cpu", "cli", "export"})
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    status = export_sample() or tell_story(options)
    if status:
        return status
    status, report = compare_methods(options)
    if report is None:
        return status
    print_report(report)
    print(
        f"\nDone in {time.perf_counter() - started:.0f} s. The bundle is {BUNDLE}; `mirrorsd --help` shows what else."
    )
    return 0 if report["identical"] else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the demo's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=160, help="new tokens per text")
    parser.add_argument("--device-map", default="auto")
    return parser.parse_args(arguments)


def export_sample() -> int:
    """Export the storyteller pair anew."""
    print(f"\n== Export {SAMPLE} to {BUNDLE}", flush=True)
    shutil.rmtree(ROOT / BUNDLE, ignore_errors=True)
    WORKPLACE.mkdir(exist_ok=True)
    return mirrorsd("export", str(SAMPLE / "target"), "--draft", str(SAMPLE / "draft"), "-o", str(BUNDLE))


def tell_story(options: argparse.Namespace) -> int:
    """Stream one story to the terminal, the two devices side by side."""
    print("\n== A story, decoded by mirror speculation\n", flush=True)
    print(f"{options.prompt} ...\n", flush=True)
    return mirrorsd("generate", str(BUNDLE), options.prompt, "--raw", "--method", "mirror", *shared_options(options))


def compare_methods(options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """Decode the same prompt with all methods; return the exit status and the report (None if there is none)."""
    print(f"\n== The same story by {', '.join(METHODS)} decoding", flush=True)
    prompts = WORKPLACE / "prompt.jsonl"
    question = {"question_id": 1, "category": "story", "turns": [options.prompt]}
    prompts.write_text(json.dumps(question) + "\n", encoding="utf-8")
    methods = ("--methods", ",".join(METHODS), "--repeats", "3", "--raw", "--json")
    command = command_line("compare", str(BUNDLE), "--prompts", str(prompts), *methods, *shared_options(options))
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
    return ("--max-new-tokens", str(options.tokens), "--device-map", options.device_map)


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
