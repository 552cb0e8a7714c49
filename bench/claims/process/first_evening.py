"""The demo from nothing: a fresh clone, a fresh environment, an empty cache; how long each stage takes.

    python bench/claims/process/first_evening.py --output first_evening.json

What is committed here is cloned into a temporary folder, and `scripts/demo.py` is run there. A stage begins with a line
of the demo's that says so. Beside the clock's seconds stand those of the processor, of all its cores and of all
processes that the demo began, and the bytes that the stage left on the disk: a busy machine lengthens the first and
hardly the others.

Exit status 1 where a text differs, where it takes more than `--most` seconds, or where `auto` is not faster than plain
on `--gains` of the questions that speculation is for.
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil

from mirrorsd.bench import runs

ROOT = Path(__file__).resolve().parents[3]
STAGES = {
    "Making": "environment",
    "Installing": "install",
    "== Download": "download",
    "== Export": "export",
    "Two answers": "answers",
    "== The same": "compare",
    "Done in": "",
}
"""How the line begins that a stage begins with; the last one ends the demo."""
SPECULATIVE = ("edit", "summary", "follow-up")
"""Questions whose answers stand in the text already, in part."""


def main() -> int:
    """Run the demo, print its stages, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=300.0, help="seconds that all may take")
    parser.add_argument("--gains", type=int, default=2, help="questions on which `auto` must be faster than plain")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pair", default="smollm2", help="which models, as the demo names them")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        clone = Path(folder) / "mirrorsd"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
        status, stages, said = watch(clone, ["--pair", options.pair])
    seconds, gains = sum(row["seconds"] for row in stages), times_plain(said)
    runs.print_rows(stages, ("stage", "seconds", "processor_s", "mb"))
    faster = [kind for kind in SPECULATIVE if gains.get(kind, 0.0) > 1.0]
    identical = any("all texts identical" in line for line in said)
    print(f"{seconds:.0f} s in all; auto, times plain: {gains}; texts {'identical' if identical else 'NOT identical'}")
    report = runs.header(Path(f"{options.pair}.mirror"), load=round(os.getloadavg()[0], 2))
    found = {"seconds": round(seconds, 1), "auto_times_plain": gains, "identical": identical, "status": status}
    runs.finish(report | found | {"ends": "honoured", "rows": stages}, options.output)
    is_fine = identical and seconds <= options.most and len(faster) >= options.gains
    return status or int(not is_fine)


def watch(clone: Path, words: list[str]) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Run the demo in `clone`: its status, a row per stage, and the lines that it said."""
    own = {"PIP_NO_CACHE_DIR": "1", "MIRRORSD_CACHE": str(clone / ".demo-cache"), "PYTHONUNBUFFERED": "1"}
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    command = [sys.executable, "scripts/demo.py", *words]
    demo = psutil.Popen(
        command, cwd=clone, env=variables | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []
    begun: list[tuple[str, float, float, int]] = [("start", perf_counter(), 0.0, bytes_in(clone))]
    for line in demo.stdout:
        print(line, end="", flush=True)
        said.append(line.rstrip())
        name = next((name for start, name in STAGES.items() if line.startswith(start)), None)
        if name is not None and name != begun[-1][0]:
            begun.append((name, perf_counter(), processor_seconds(demo), bytes_in(clone)))
    status = demo.wait()
    rows = []
    for (name, started, worked, size), (_, ended, had_worked, left) in itertools.pairwise(begun):
        processor = round(had_worked - worked, 1)
        mb = round((left - size) / 1e6)
        rows.append({"stage": name, "seconds": round(ended - started, 1), "processor_s": processor, "mb": mb})
    return status, rows, said


def processor_seconds(process: psutil.Process) -> float:
    """Of the process and all that it has waited for; what it starts has ended when a stage ends."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def times_plain(said: list[str]) -> dict[str, float]:
    """What `auto` made of each kind of question, out of the table that `compare` prints.

    >>> times_plain(["  edit   plain  24.6  1.00  1.00", "         auto   34.9  1.42  3.17  41%  29.7 ms"])
    {'edit': 1.42}
    """
    found, kind = {}, ""
    for line in said:
        words = line.split()
        if len(words) > 3 and words[1] == "plain":
            kind = words[0]
        elif len(words) > 3 and words[0] == "auto" and kind and words[2].replace(".", "").isdigit():
            found[kind] = float(words[2])
    return found


if __name__ == "__main__":
    sys.exit(main())
