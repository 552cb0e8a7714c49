"""Lint, types and tests in the project's own environment: what CI and the pre-commit hooks run.

python3 scripts/test.py                  everything but the long tests
python3 scripts/test.py --all            those too: hundreds of repetitions, installs, other tools
python3 scripts/test.py --quick          without the slow tests
python3 scripts/test.py --only types     one part: lint, types, unit, end-to-end, or tests (the last two)
python3 scripts/test.py --only oldest    the unit tests with the oldest packages that pyproject.toml allows
python3 scripts/test.py --only newest    all tests with the newest ones: what a user is given who installs it today
python3 scripts/test.py --only ray       replicas under Ray Serve, which it installs
python3 scripts/test.py --devices        on what stands in for devices too: a GPU made of software, an NPU's compiler
python3 scripts/test.py -k manifest      anything else goes to pytest
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import IO, NamedTuple

from environment import ROOT, SetupError, ensure_end, ensure_environment, link_package, run_here

TIERS = {"unit": ("tests/unit",), "end-to-end": ("tests/device", "tests/parity", "tests/end_to_end")}
"""The tests in two tiers: the first is part of the gate that every change passes within minutes.

Folders of few and long tests come first, so that no process is left alone with them at the end."""
PARTS = ("lint", "types", *TIERS)
ENDS = {"oldest": ("unit",), "newest": ("tests",)}
"""What runs in environments of their own, which take minutes to make: only where they are asked for."""
RAY = {"ray": ("tests/ray",)}
"""A tier that nothing else includes: what it installs is big."""
NO_DEVICES = {"lint", "types", "unit", *RAY}
"""Parts that need no stand-in for a device."""
SLOWEST = "--durations=20"
NO_TESTS = 5
"""What pytest says where nothing was chosen."""
DEVICES = {
    "webgpu": ["scripts/check_webgpu.py", "--prepare", "--install"],
    "npu compiler": ["scripts/npu_compiler/setup.sh"],
    "frozen program": ["scripts/check_frozen.py", "--prepare"],
}
"""Each installs what its tests need where that can be done, and says why not elsewhere; the last line may be the
variables that the tests are told. That takes little computing and much waiting, so it is done beside the rest."""
SETUP_LIMIT_S = 300
TESTS_LIMIT_S = 3600
"""A tier takes minutes. A process that hangs while it ends is no test any more, and has no other deadline."""
NO_LIMIT = ("-o", "faulthandler_timeout=0")
"""Long tests have deadlines of their own."""
WORKERS = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0", "-n")
"""Several processes: a file's tests stay together, for they share models. `-n 0` switches it off. Where one dies the
run ends: behind a process that took its place, xdist 3.8 has waited for ever."""
DIED = "MIRRORSD_TESTS_DIED"
"""Names the file in which `tests/conftest.py` notes the test whose process died."""
NUM_WORKERS = {"unit": "2"}
"""Unit tests compute; a third process computes while tests of the other tier wait for programs and clocks."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For PyTorch in each of them, and for exports: with more threads than processors each waits for all others."""


class Done(NamedTuple):
    """A part that has run."""

    passed: bool
    seconds: float


class Stand(NamedTuple):
    """What stands in for a device: the variables that its tests are told, None where there is nothing, and why."""

    variables: dict[str, str] | None
    said: str
    seconds: float


def main() -> int:
    """Run the parts in order; every part runs even where an earlier one failed."""
    options, pytest_arguments = parse_arguments(sys.argv[1:])
    is_end = options.only in ENDS
    left_out = "not slow and not long" if options.quick else "" if options.all else "not long"
    parts = parts_of(options.only, pytest_arguments)
    stands: dict[str, Future[Stand]] = {}

    def run(part: str, output: IO[str] | None = None) -> Done:
        started = monotonic()
        variables = {} if part in NO_DEVICES else ready(stands)
        variables |= {"PYTHONPATH": str(ROOT / ".typing")} if is_end else {}
        chosen = f"{left_out} or npu_compiler" if left_out and stands and part not in NO_DEVICES else left_out
        arguments = [*(["-m", chosen] if chosen else []), *(NO_LIMIT if options.all else []), *pytest_arguments]
        limit_s = None if options.all else TESTS_LIMIT_S
        return Done(run_part(python, part, arguments, variables, limit_s, output), monotonic() - started)

    done: dict[str, Done] = {}
    # Two installations for devices would get in each other's way. Types take one core, beside the tests.
    with ThreadPoolExecutor(1) as installing, ThreadPoolExecutor(1) as checking:
        if options.devices and not set(parts) <= NO_DEVICES:
            stands.update({name: installing.submit(prepare, words) for name, words in DEVICES.items()})
        try:
            python = str(environment_of(options.only))
        except SetupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        types = checking.submit(quietly, run, "types") if "types" in parts[:-1] else None
        for part in parts:
            if types is None or part != "types":
                done[part] = run(part)
                tell(part, done[part])
        if types is not None:
            done["types"], said = types.result()
            print(said, end="", flush=True)
            tell("types", done["types"])
    print("== " + ", ".join(f"{name} {part.seconds:.0f} s" for name, part in done.items()), flush=True)
    failed = [name for name, part in done.items() if not part.passed]
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def environment_of(only: str | None) -> Path:
    """Make the environment that these parts run in.

    Raises:
        SetupError: it cannot be made.
    """
    if only in ENDS:
        link_package(ROOT)
        return ensure_end(only, {"dev"})
    return ensure_environment({"dev", *({only} & {*RAY} if only else ())})


def quietly(run: Callable[[str, IO[str]], Done], part: str) -> tuple[Done, str]:
    """Run a part beside others; what it says is kept."""
    with TemporaryFile("w+", encoding="utf-8") as output:
        done = run(part, output)
        output.seek(0)
        return done, output.read()


def tell(part: str, done: Done) -> None:
    """Say that a part has failed, where what it said stands."""
    if not done.passed:
        print(f"FAILED: {part}", flush=True)


def parts_of(only: str | None, pytest_arguments: list[str]) -> tuple[str, ...]:
    """The parts that run; all tiers run as one part, so that no process waits for the last test of another tier."""
    if only in ENDS:
        return ("tests",) if names_files(pytest_arguments) else ENDS[only]
    return (only,) if only else ("lint", "types", "tests")


def folders_of(part: str, pytest_arguments: list[str]) -> tuple[str, ...]:
    """Where a part's tests are; tests of files that are named run alone, whichever tier they are of."""
    if part == "tests":
        return () if names_files(pytest_arguments) else sum(TIERS.values(), ())
    return (TIERS | RAY)[part]


def names_files(pytest_arguments: list[str]) -> bool:
    """Whether some tests are named by their files."""
    return any((ROOT / word.partition("::")[0]).exists() for word in pytest_arguments if word[:1] != "-")


def prepare(command: list[str]) -> Stand:
    """Get ready what stands in for a device."""
    if sys.platform != "linux":
        return Stand(None, "what stands in for the device is made for Linux", 0.0)
    started = monotonic()
    words = [sys.executable, *command] if command[0].endswith(".py") else command
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SETUP_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Stand(None, f"it was not set up within {SETUP_LIMIT_S} s", monotonic() - started)
    last = done.stdout.splitlines()[-1:]
    variables = json.loads(last[0]) if last and last[0].startswith("{") else {}
    return Stand(None if done.returncode else variables, done.stdout + done.stderr, monotonic() - started)


def ready(stands: dict[str, Future[Stand]]) -> dict[str, str]:
    """Wait for what stands in for devices, say what there is, and return what the tests are told."""
    variables: dict[str, str] = {}
    for name, coming in stands.items():
        stand = coming.result()
        print(f"== {name}: {'ready' if stand.variables is not None else 'skipped'}, {stand.seconds:.0f} s", flush=True)
        if stand.variables is None:
            print(stand.said, flush=True)
        variables |= stand.variables or {}
    return variables


def run_part(
    python: str,
    part: str,
    pytest_arguments: list[str],
    variables: dict[str, str],
    limit_s: float | None = TESTS_LIMIT_S,
    output: IO[str] | None = None,
) -> bool:
    """Run one part; True if all passed. `variables` are for tests on what stands in for devices; tests have a limit.

    What a part says goes to `output`, if given: then it runs beside others.
    """
    if part in ("lint", "types"):
        return run_checks(python, part, output)
    print(f"== {part}", flush=True, file=output)
    folders, workers = folders_of(part, pytest_arguments), [*WORKERS, NUM_WORKERS.get(part, "3")]
    command = [python, "-m", "pytest", *workers, SLOWEST, *folders, *pytest_arguments]
    with TemporaryDirectory() as folder:
        died = Path(folder) / "died"
        variables = ONE_THREAD | variables | {DIED: str(died)}
        status = run_here(command, variables, output, limit_s)
        if died.exists():
            where = died.read_text(encoding="utf-8")
            print(f"== {part} once more: a process died in {where}", flush=True, file=output)
            died.unlink()
            status = run_here(command, variables, output, limit_s) or int(died.exists())
    return status == 0 or (status == NO_TESTS and bool(folders))


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the script's own options from those that go to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave the slow tests out")
    parser.add_argument("--all", action="store_true", help="the long tests too")
    parser.add_argument("--devices", action="store_true", help="the tests that need a device's stand-in, too")
    parser.add_argument("--only", choices=(*PARTS, "tests", *ENDS, *RAY), help="run one part")
    return parser.parse_known_args(arguments)


def run_checks(python: str, part: str, output: IO[str] | None = None) -> bool:
    """Run the commands of one part; True if all passed. What they say goes to `output`, if given."""
    if part == "types":
        link_package(ROOT)
    passed = True
    for command in check_commands(part):
        print(f"== {' '.join(command)}", flush=True, file=output)
        passed &= run_here([python, "-m", *command], {"MYPYPATH": str(ROOT / "scripts")}, output) == 0
    return passed


def check_commands(part: str) -> list[list[str]]:
    """The tools behind `lint` and `types`; the scripts are not in the package, so mypy takes them on their own.

    They are named one by one, as the settings of the package leave the folder out. With other settings mypy would check
    the package anew, which they import.
    """
    if part == "lint":
        return [["ruff", "format", "--check", "."], ["ruff", "check", "."]]
    scripts = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.py"))
    return [["mypy"], ["mypy", *scripts]]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
