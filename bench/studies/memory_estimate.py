"""The memory that `mirrorsd doctor` expects a bundle to need, against the peak that a process really reaches (Linux).

    python bench/studies/memory_estimate.py storyteller.mirror --output memory.json

Two processes of their own load the bundle and generate to the end of the context: the first may have to compile the
draft, the second finds it on disk. Peaks are resident memory (VmHWM).
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.doctor.memory import SYSTEM, memory_needs


def main() -> None:
    """Estimate, measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(peak_bytes(options.bundle, options.device_map))
        return
    needs = memory_needs(read_bundle(options.bundle), load_device_map(options.device_map))
    expected = sum(need.total for need in needs if need.device == SYSTEM)
    command = [sys.executable, __file__, str(options.bundle), "--device-map", options.device_map, "--once"]
    peaks = [int(subprocess.check_output(command, text=True)) for _ in range(2)]
    report: dict[str, Any] = {"bundle": options.bundle.name, "device_map": options.device_map}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    report |= {"expected_bytes": expected, "first_peak_bytes": peaks[0], "later_peak_bytes": peaks[1]}
    report |= {"expected_over_later": round(expected / peaks[1], 3), "needs": [asdict(need) for need in needs]}
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def peak_bytes(bundle: Path, device_map: str) -> int:
    """Load, generate to the end of the context, and say how much was resident at most."""
    with MirrorPipeline.load(bundle, device_map=device_map) as pipe:
        room = pipe.manifest.target.context
        pipe.generate("Once upon a time", max_new_tokens=room, ignore_eos=True, temperature=0.0, method="mirror")
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
