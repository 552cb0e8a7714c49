"""How long a program takes until its first token, and how much an install writes.

    python bench/claims/process/start_up.py pair.mirror [--python ENV/bin/python] [--repeats 5] --output start_up.json

Starts a short program in fresh processes: first with an empty cache (the bundle's files are hashed, its draft is
compiled), then with what the first one kept. Seconds are of the clock, medians; those of the processor, of all its
cores, stand beside them, since a busy machine lengthens the others. Sizes are those of the files that pip recorded for
an extra's packages and all that these need, in the environment of `--python`; a package that is not installed there is
named instead.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from mirrorsd.bench import runs

EXTRAS = ("cpu", "cpu,cli", "cpu,server", "cpu,cli,export", "cpu,cli,export,compress")
STARTING = """
import json, sys
from time import perf_counter, process_time

def now():
    return perf_counter(), process_time()

times = [now()]
from mirrorsd import MirrorPipeline
times.append(now())
with MirrorPipeline.load(sys.argv[1], device_map="cpu") as pipe:
    times.append(now())
    for chunk in pipe.stream("Once upon a time", max_new_tokens=1, ignore_eos=True):
        times.append(now())
        break
    import psutil
    memory = psutil.Process().memory_info().rss
found = {}
for name, before, after in zip(("import", "load", "first_token"), times, times[1:]):
    found |= {f"{name}_s": after[0] - before[0], f"{name}_processor_s": after[1] - before[1]}
print(json.dumps({**found, "memory_mb": memory / 1e6}))
"""
SIZES = """
import json, sys
from importlib.metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

def needed(name, extras, seen, missing):
    key = name.lower().replace("_", "-")
    if extras <= seen.get(key, set()) and key in seen:
        return
    try:
        found = distribution(name)
    except PackageNotFoundError:
        missing.add(key)
        return
    seen[key] = seen.get(key, set()) | extras
    for text in found.requires or ():
        wanted = Requirement(text)
        places = [{"extra": extra} for extra in ("", *extras)]
        if wanted.marker is None or any(wanted.marker.evaluate(place) for place in places):
            needed(wanted.name, set(wanted.extras), seen, missing)

found = []
for extras in sys.argv[1:]:
    seen, missing = {}, set()
    needed("mirrorsd", set(extras.split(",")), seen, missing)
    paths = [file.locate() for name in seen for file in distribution(name).files or ()]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    found.append({"extras": extras, "packages": len(seen), "mb": round(size / 1e6), "missing": sorted(missing)})
print(json.dumps(found))
"""


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the environment to measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as cache:
        starts = [
            run(options.python, STARTING, [str(options.bundle)], {"MIRRORSD_CACHE": cache})
            for _ in range(options.repeats + 1)
        ]
    rows = [{"start": "first", **rounded(starts[:1])}, {"start": "later", **rounded(starts[1:])}]
    sizes: Any = run(options.python, SIZES, list(EXTRAS), {})
    runs.print_rows(rows, tuple(rows[0]))
    runs.print_rows(sizes, tuple(sizes[0]))
    num_bytes = sum(path.stat().st_size for path in options.bundle.rglob("*") if path.is_file())
    where = {"device_map": "cpu", "repeats": options.repeats, "bundle_mb": round(num_bytes / 1e6)}
    runs.finish(runs.header(options.bundle, **where) | {"rows": rows, "installs": sizes}, options.output)


def run(python: Path, code: str, arguments: list[str], variables: dict[str, str]) -> Any:
    """What a fresh process of an environment prints as JSON."""
    command = [str(python), "-W", "ignore", "-c", code, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return json.loads(finished.stdout.splitlines()[-1])


def rounded(starts: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over several starts.

    >>> rounded([{"load_s": 1.0}, {"load_s": 3.0}, {"load_s": 1.234}])
    {'load_s': 1.23}
    """
    return {name: round(median(start[name] for start in starts), 2) for name in starts[0]}


if __name__ == "__main__":
    main()
