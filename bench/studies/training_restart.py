"""Kill a draft's training for real (SIGKILL), start it again, and compare the losses of the steps made twice.

    python bench/studies/training_restart.py TARGET WORK --output bench/results/epyc/training_restart.json

`WORK` must hold text of the target (`mirrorsd train text`). The killed process had gone on undisturbed past its last
checkpoint; the next one makes the same steps again from that checkpoint, so the first is the undisturbed reference.
The training is killed twice: within its warm-up, where the learning rate rises from step to step, and behind it. The
decay is left out: there the learning rate falls with the seconds of training, and seconds differ.
"""

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.training.run.schedule import WarmStableDecay

TOLERANCE = 1e-3
PATIENCE_S = 900.0
SECONDS = 3000.0
WARM_STEPS = WarmStableDecay(budget_s=SECONDS).warm_steps


def read_losses(table: Path) -> dict[int, dict[str, float]]:
    """Losses by step, of whole rows only."""
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return {int(row["step"]): {name: float(row[name]) for name in row if name not in _NOT_LOSSES} for row in rows}


_NOT_LOSSES = ("step", "tokens", "seconds")


def run_until(command: list[str], is_over: Any) -> None:
    """Run a training until `is_over()`, then kill it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    give_up = time.monotonic() + PATIENCE_S
    try:
        while not is_over():
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit("the training ended, or did not get far enough, before it could be killed")
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main(target: Path, texts: Path, extra_steps: int) -> dict[str, Any]:
    """Run, kill, resume and compare; then once more behind the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        for name in ("text", "text_held_back"):
            shutil.copytree(texts / name, work / name)
        command = [sys.executable, "-m", "mirrorsd.cli", "train", "draft", str(target), "-o", f"{folder}/draft"]
        command += ["--work", str(work), "--seconds", str(SECONDS), "--batch", "2", "--length", "256", "--no-compile"]
        command += ["--threads", "1", "--count-cpu", "--resume", "--save-every", "15", "--report-every", "1"]
        kills = [
            {"killed": where, **kill_and_compare(command, work / "draft", first_step, extra_steps)}
            for where, first_step in (("within the warm-up", 0), ("behind the warm-up", WARM_STEPS))
        ]
    return {
        "warm_steps": WARM_STEPS,
        "kills": kills,
        "is_the_same": all(kill["largest_difference"] <= TOLERANCE for kill in kills),
        "machine": describe_machine(),
        "versions": installed_versions(),
    }


def kill_and_compare(command: list[str], run: Path, first_step: int, extra_steps: int) -> dict[str, Any]:
    """Kill the training `extra_steps` behind its first checkpoint after `first_step`; let it make them again."""
    table, checkpoint = run / "losses.csv", run / "last.pt"
    steps_by_checkpoint: dict[int, int] = {}

    def is_far_beyond_a_checkpoint() -> bool:
        made = max(read_losses(table), default=0)
        if not checkpoint.is_file() or made < first_step:
            return False
        return made >= steps_by_checkpoint.setdefault(checkpoint.stat().st_mtime_ns, made) + extra_steps

    run_until(command, is_far_beyond_a_checkpoint)
    before = read_losses(table)
    table.rename(table.with_suffix(".killed.csv"))  # what the next process writes is its own
    run_until(command, lambda: max(read_losses(table), default=0) >= max(before))
    return compare(before, read_losses(table))


def compare(before: dict[int, dict[str, float]], again: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Largest difference of any loss over the steps that both processes made."""
    both = sorted(set(before) & set(again))
    difference = max(abs(before[step][name] - again[step][name]) for step in both for name in before[step])
    return {
        "steps_by_the_killed_process": max(before),
        "steps_compared": len(both),
        "largest_difference": round(difference, 6),
        "last_losses": {"killed": before[both[-1]], "resumed": again[both[-1]]},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("texts", type=Path, metavar="WORK")
    parser.add_argument("--extra-steps", type=int, default=4, help="steps beyond the checkpoint before the kill")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = main(options.target, options.texts, options.extra_steps)
    print(json.dumps(found, indent=2))
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if found["is_the_same"] else 1)
