"""Lint, types and tests in the project's own environment: what CI and the pre-commit hooks run.

python3 scripts/test.py                  everything but the long tests
python3 scripts/test.py --all            those too: hundreds of repetitions, installs, other tools
python3 scripts/test.py --quick          without the slow tests
python3 scripts/test.py --only types     one part: lint, types, unit, end-to-end, or tests (the last two); ray
python3 scripts/test.py --devices        then what stands in for devices: a GPU made of software, Intel's NPU compiler
python3 scripts/test.py -k manifest      anything else goes to pytest
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from time import monotonic

from environment import ROOT, SetupError, ensure_environment, link_package, run_here

TIERS = {"unit": ("tests/unit",), "end-to-end": ("tests/end_to_end", "tests/parity", "tests/device")}
"""The tests in two tiers: the first is part of the gate that every change passes within minutes."""
PARTS = ("lint", "types", *TIERS)
RAY = {"ray": ("tests/ray",)}
"""A tier that nothing else includes: what it installs is big."""
SLOWEST = "--durations=20"
NO_TESTS = 5
"""What pytest says where nothing was chosen."""
NOTHING_TO_CHECK = 4
DEVICES = {
    "webgpu": ["scripts/check_webgpu.py", "--quick", "--install"],
    "npu compiler": ["scripts/npu_compiler/check.sh"],
    "frozen program": ["scripts/check_frozen.py"],
}
"""Each installs what it needs where that can be done, and says why not elsewhere."""
SETUP_LIMIT_S = 120
WORKERS = ("-n", "2", "--dist", "loadfile")
"""Two processes: a file's tests stay together, for they share models. `-n 0` switches it off."""


def main() -> int:
    """Run the parts in order; every part runs even where an earlier one failed."""
    options, pytest_arguments = parse_arguments(sys.argv[1:])
    try:
        python = str(ensure_environment({"dev", "ray"} if options.only in RAY else {"dev"}))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left_out = "not slow and not long" if options.quick else "" if options.all else "not long"
    pytest_arguments = [*(["-m", left_out] if left_out else []), *pytest_arguments]
    jobs = {
        part: partial(run_part, python, part, pytest_arguments) for part in parts_of(options.only, pytest_arguments)
    }
    if options.devices:
        jobs |= {name: partial(passes_on_device, python, name, command) for name, command in DEVICES.items()}
    failed: list[str] = []
    seconds: dict[str, float] = {}
    for name, job in jobs.items():
        started = monotonic()
        if not job():
            print(f"FAILED: {name}", flush=True)
            failed.append(name)
        seconds[name] = monotonic() - started
    print("== " + ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items()), flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def parts_of(only: str | None, pytest_arguments: list[str]) -> tuple[str, ...]:
    """The parts that run; tests of files that are named run as one part, whichever tier they are of."""
    names_files = any((ROOT / word.partition("::")[0]).exists() for word in pytest_arguments if word[:1] != "-")
    tests = ("tests",) if names_files else tuple(TIERS)
    if only == "tests":
        return tests
    return (only,) if only else ("lint", "types", *tests)


def run_part(python: str, part: str, pytest_arguments: list[str]) -> bool:
    """Run one part; True if all passed."""
    if part not in ("tests", *TIERS, *RAY):
        return run_checks(python, part)
    print(f"== {part}", flush=True)
    folders = (TIERS | RAY).get(part, ())
    status = run_here([python, "-m", "pytest", *WORKERS, SLOWEST, *folders, *pytest_arguments])
    return status == 0 or (status == NO_TESTS and bool(folders))


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the script's own options from those that go to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave the slow tests out")
    parser.add_argument("--all", action="store_true", help="the long tests too")
    parser.add_argument("--devices", action="store_true", help="the tests that need a device's stand-in, too")
    parser.add_argument("--only", choices=(*PARTS, "tests", *RAY), help="run one part")
    return parser.parse_known_args(arguments)


def passes_on_device(python: str, name: str, command: list[str]) -> bool:
    """Run the tests on a stand-in for a device; True too where there is none to be had, with a line that says so."""
    if sys.platform != "linux":
        print(f"== {name}: skipped, what stands in for the device is made for Linux", flush=True)
        return True
    print(f"== {name}", flush=True)
    started = monotonic()
    words = [sys.executable, *command] if command[0].endswith(".py") else [*command, python]
    status = run_here(words, {"SETUP_LIMIT_S": str(SETUP_LIMIT_S)})
    said = "skipped (see above)" if status == NOTHING_TO_CHECK else "FAILED" if status else "passed"
    print(f"== {name}: {said}, {monotonic() - started:.0f} s", flush=True)
    return status in (0, NOTHING_TO_CHECK)


def run_checks(python: str, part: str) -> bool:
    """Run the commands of one part; True if all passed."""
    if part == "types":
        link_package(ROOT)
    passed = True
    for command in check_commands(part):
        print(f"== {' '.join(command)}", flush=True)
        passed &= run_here([python, "-m", *command], {"MYPYPATH": str(ROOT / "scripts")}) == 0
    return passed


def check_commands(part: str) -> list[list[str]]:
    """The tools behind `lint` and `types`; the scripts are not in the package, so mypy takes them on their own."""
    if part == "lint":
        return [["ruff", "format", "--check", "."], ["ruff", "check", "."]]
    scripts = ["mypy", "--config-file=", "--strict", "--explicit-package-bases", "scripts"]
    return [["mypy"], scripts]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
