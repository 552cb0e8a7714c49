"""What PyInstaller has frozen from the wheel runs at the first try, and says the same (`check_frozen.py`)."""

import json
import os
import re
import subprocess
from pathlib import Path
from textwrap import indent
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest
from installed_wheel import FREEZES, ROOT, InstalledWheel, run_quietly

pytestmark = [
    pytest.mark.skipif(not os.environ.get(FREEZES), reason="freezing takes minutes: python3 scripts/check_frozen.py"),
]
PROGRAM = """
import json, sys
from time import perf_counter
started = perf_counter()
from mirrorsd import MirrorPipeline
imported = perf_counter()
with MirrorPipeline.load(sys.argv[1], device_map="auto") as pipe:
    loaded = perf_counter()
    result = pipe.generate("Once upon a time", max_new_tokens=16, method="mirror")
first = result.stats.time_to_first_token_ms / 1e3
times = {"import": imported - started, "load": loaded - imported, "first_token": first}
rooms = sorted({name.split(".")[1] for name in sys.modules if name.startswith("mirrorsd.")})
print(json.dumps({"ids": list(result.token_ids), "map": pipe.device_map.name, "seconds": times, "rooms": rooms}))
"""
EITHER = f"""
import sys

def program():
{indent(PROGRAM, "    ")}
if sys.argv[1:2] == ["program"]:
    del sys.argv[1]
    program()
else:
    from mirrorsd.cli import main
    main()
"""
"""A program, and the command: to freeze takes half a minute, whatever it is."""
FIRST_ANSWER_S = 120


@pytest.fixture(scope="module")
def environment(installed_wheel: InstalledWheel) -> Path:
    """The programs of an environment that has the wheel, ONNX Runtime and PyInstaller, and nothing else of ours."""
    return installed_wheel.programs


def freeze(environment: Path, name: str, code: str, place: Path) -> tuple[Path, Path]:
    """The program as a file, and as PyInstaller makes it, with no option that says what belongs to it."""
    program = place / f"{name}.py"
    program.write_text(code, encoding="utf-8")
    run_quietly(
        [
            *(str(environment / "pyinstaller"), "--noconfirm", "--log-level", "ERROR", str(program)),
            *("--distpath", str(place / "dist"), "--workpath", str(place / "work"), "--specpath", str(place)),
        ]
    )
    return program, place / "dist" / name / (f"{name}.exe" if os.name == "nt" else name)


def alone() -> dict[str, str]:
    """The variables that a program needs on any machine."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "MIRRORSD_CACHE") if name in os.environ}


def said(command: list[str]) -> dict[str, object]:
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=alone())
    assert finished.returncode == 0, finished.stderr
    found: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_a_frozen_program_runs_at_the_first_try(environment: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    program, frozen_program = freeze(environment, "program", PROGRAM, tmp_path)
    plain = said([str(environment / "python"), str(program), str(tiny_bundle)])
    frozen = said([str(frozen_program), str(tiny_bundle)])
    assert frozen["ids"] == plain["ids"] and frozen["map"] == plain["map"]
    files = (path for path in frozen_program.parent.rglob("*") if path.is_file() and not path.is_symlink())
    size = sum(path.stat().st_size for path in files)
    print(f"\nfrozen: {size / 1e6:.0f} MB, {frozen['seconds']}; from the wheel: {plain['seconds']}")


class Frozen(NamedTuple):
    """The program, and what PyInstaller has made of it: the words that start each."""

    plain: list[str]
    frozen: list[str]


@pytest.fixture(scope="module")
def either(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """What is a program with the word for it, and `mirrorsd` itself without."""
    program, frozen = freeze(environment, "mirrorsd_frozen", EITHER, tmp_path_factory.mktemp("either"))
    return Frozen([str(environment / "python"), str(program)], [str(frozen)])


@pytest.fixture(scope="module")
def command(either: Frozen) -> list[str]:
    """`mirrorsd` itself, frozen."""
    return either.frozen


def test_a_frozen_program_says_what_it_says_otherwise(either: Frozen, tiny_bundle: Path) -> None:
    """It needs no room of the package but those that a frozen program always has, whatever else it imports."""
    plain, frozen = (said([*words, "program", str(tiny_bundle)]) for words in either)
    assert frozen["ids"] == plain["ids"] and frozen["map"] == plain["map"]
    assert frozen["rooms"] == plain["rooms"]
    hook = (ROOT / "freezing" / "hook-mirrorsd.py").read_text(encoding="utf-8")
    taken = re.search(r"_ROOMS = \(([^)]*)\)", hook)
    assert taken is not None
    assert set(frozen["rooms"]) <= set(re.findall(r"\w+", taken[1]))  # type: ignore[call-overload]


def test_the_frozen_command_says_what_the_other_one_says(
    command: list[str], environment: Path, tiny_bundle: Path
) -> None:
    installed = [str(environment / "mirrorsd")]
    bundle, question = str(tiny_bundle), "Once upon a time\nAnd then?\n"
    for words in (
        ["--version"],
        ["--help"],
        ["inspect", bundle],
        ["pairs", "--json"],
        ["generate", bundle, "Once upon a time", "--max-new-tokens", "12", "--greedy"],
        ["chat", bundle, "--max-new-tokens", "12", "--greedy"],
        ["inspect", "hf:nobody"],
        ["export", bundle, "--draft", bundle],
    ):
        theirs, ours = (
            subprocess.run([*start, *words], input=question, capture_output=True, text=True, check=False, env=alone())
            for start in (installed, command)
        )
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), (words, ours.stderr)


@pytest.mark.parametrize("words", [["devices"], ["doctor"], ["doctor", "BUNDLE"]])
def test_the_frozen_command_examines_the_machine(command: list[str], words: list[str], tiny_bundle: Path) -> None:
    found = said([*command, *(str(tiny_bundle) if word == "BUNDLE" else word for word in words), "--json"])
    assert found["device_maps"]
    assert all(test["identical"] for test in found.get("self_tests", []))  # type: ignore[attr-defined]


def test_the_frozen_command_serves_and_shows_its_page(command: list[str], tiny_bundle: Path) -> None:
    serving = subprocess.Popen(
        [*command, "serve", str(tiny_bundle), "--port", "0"], stderr=subprocess.PIPE, text=True, env=alone()
    )
    try:
        assert serving.stderr is not None
        lines = iter(serving.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        for path in ("/", "/page/app.js", "/v1/models"):
            assert urlopen(url + path, timeout=FIRST_ANSWER_S).status == 200
        asked = {"prompt": "Once upon a time", "max_tokens": 4}
        request = Request(f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=FIRST_ANSWER_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    finally:
        serving.terminate()
        serving.communicate(timeout=60)
