"""What loading costs with and without compiled drafts on disk, and whether a growing text ever stalls.

    python bench/studies/second_load.py storyteller.mirror --output second_load.json

The bundle is copied first, so that no cache of an earlier run helps. Every load is a process of its own. `growth` is
one generation that passes every capacity of the draft: its longest step against the median one.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.openvino.draft_compiler import DraftCompiler
from mirrorsd.graphs.bundle_files import read_bundle

PROMPT = "Once upon a time"


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="second loads; the median counts")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(load_once(options.bundle, options.device_map)))
        return
    report: dict[str, Any] = {"bundle": options.bundle.name, "device_map": options.device_map}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / options.bundle.name
        shutil.copytree(options.bundle, copy)
        report["compile_ms"] = compile_times(copy, options.device_map)
        report |= measure(copy, options.device_map, options.repeats)
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def compile_times(bundle: Path, device_map: str) -> dict[str, float]:
    """Milliseconds to compile each static shape, nothing on disk."""
    entry = read_bundle(bundle).draft
    compiler = DraftCompiler(bundle, entry, load_device_map(device_map).draft)
    compiler.cache = None
    times = {}
    for capacity in entry.capacities:
        for bucket in entry.buckets:
            started = perf_counter()
            compiler.compile(bucket.rows, bucket.tips, capacity)
            name = f"{bucket.rows} rows, {bucket.tips} tips, {capacity} slots"
            times[name] = round(1e3 * (perf_counter() - started), 1)
    return times


def measure(bundle: Path, device_map: str, repeats: int) -> dict[str, Any]:
    """First load, later loads, their share, and the growth run of the last one."""
    command = [sys.executable, __file__, str(bundle), "--device-map", device_map, "--once"]
    runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(1 + repeats)]
    second = median(run["load_seconds"] for run in runs[1:])
    share = round(second / runs[0]["load_seconds"], 3)
    seconds = {"first_load_seconds": runs[0]["load_seconds"], "second_load_seconds": second, "share": share}
    return seconds | {"growth": runs[-1]["growth"]}


def load_once(bundle: Path, device_map: str) -> dict[str, Any]:
    """Load, then generate up to the end of the context."""
    started = perf_counter()
    with MirrorPipeline.load(bundle, device_map=device_map) as pipe:
        seconds = perf_counter() - started
        room = pipe.manifest.target.context - 64
        result = pipe.generate(PROMPT, max_new_tokens=room, ignore_eos=True, temperature=0.0, method="mirror")
    step_ms = [1e3 * (step.ended - step.started) for step in result.steps]
    growth = {"tokens": result.num_tokens, "median_ms": round(median(step_ms), 2), "longest_ms": round(max(step_ms), 2)}
    return {"load_seconds": round(seconds, 3), "growth": growth}


if __name__ == "__main__":
    main()
