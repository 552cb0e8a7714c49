"""Lint, types and tests in the project's own environment: what CI and the pre-commit hooks run.

python3 scripts/test.py                  everything but the long tests
python3 scripts/test.py --all            those too: hundreds of repetitions, installs, other tools
python3 scripts/test.py --quick          without the slow tests
python3 scripts/test.py --only types     one part: lint, types or tests
python3 scripts/test.py --devices        then what stands in for devices: a GPU made of software, Intel's NPU compiler
python3 scripts/test.py -k manifest      anything else goes to pytest
"""

from __future__ import annotations

import argparse
import sys
from time import monotonic

from environment import ROOT, SetupError, ensure_environment, link_package, run_here

PARTS = ("lint", "types", "tests")
NOTHING_TO_CHECK = 4
DEVICES = {
    "webgpu": ["scripts/check_webgpu.py", "--quick", "--install"],
    "npu compiler": ["scripts/npu_compiler/check.sh"],
}
"""Each installs what it needs where that can be done, and says why not elsewhere."""
SETUP_LIMIT_S = 120
WORKERS = ("-n", "2", "--dist", "loadfile")
"""Two processes: a file's tests stay together, for they share models. `-n 0` switches it off."""


def main() -> int:
    """Run the parts in order; every part runs even where an earlier one failed."""
    options, pytest_arguments = parse_arguments(sys.argv[1:])
    try:
        python = str(ensure_environment({"dev"}))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts = (options.only,) if options.only else PARTS
    failed = [part for part in ("lint", "types") if part in parts and not run_checks(python, part)]
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    if "tests" in parts:
        left_out = "not slow and not long" if options.quick else "" if options.all else "not long"
        chosen = ["-m", left_out] if left_out else []
        status = run_here([python, "-m", "pytest", *WORKERS, *chosen, *pytest_arguments])
        if status:
            print(f"FAILED: tests (pytest ended with status {status})", flush=True)
            failed.append("tests")
    if options.devices:
        failed += [name for name, command in DEVICES.items() if not passes_on_device(python, name, command)]
    return 1 if failed else 0


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the script's own options from those that go to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave the slow tests out")
    parser.add_argument("--all", action="store_true", help="the long tests too")
    parser.add_argument("--devices", action="store_true", help="the tests that need a device's stand-in, too")
    parser.add_argument("--only", choices=PARTS, help="run one part")
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
