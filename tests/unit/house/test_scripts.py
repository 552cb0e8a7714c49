"""The scripts' own logic, without making an environment."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest
from loaded_scripts import load_script

from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.inventory import check_computes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["environment", "demo", "test", "check_gpu", "check_webgpu", "check_frozen"])
def any_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(request.param, monkeypatch)


def test_no_large_file_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("check_sizes", monkeypatch)
    if (ROOT / ".git").exists():
        assert script.too_large(ROOT) == []
        assert all((ROOT / name).is_file() for name in script.EXCEPT), "an exception that is not there is none"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name, size in {"small.bin": 500_000, "large.bin": 500_001, "untracked.bin": 900_000}.items():
        (tmp_path / name).write_bytes(bytes(size))
    subprocess.run(["git", "add", "small.bin", "large.bin"], cwd=tmp_path, check=True)
    assert script.too_large(tmp_path) == ["large.bin"]


def test_scripts_need_only_the_standard_library(any_script: ModuleType) -> None:
    assert Path(any_script.__file__ or "").parent == ROOT / "scripts"
    foreign = [
        line for line in Path(any_script.__file__ or "").read_text(encoding="utf-8").splitlines() if "mirrorsd." in line
    ]
    assert not [line for line in foreign if line.startswith(("import ", "from "))]


def test_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_script("environment", monkeypatch)
    environment.check_python((3, 11))
    environment.check_python((4, 0))
    with pytest.raises(environment.SetupError, match=r"This is Python 3.9; mirrorsd needs 3.11 or newer"):
        environment.check_python((3, 9))


def test_stamp_remembers_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_script("environment", monkeypatch)
    stamp = tmp_path / "stamp.json"
    assert environment.installed_extras(stamp, "a") == set()
    stamp.write_text(json.dumps({"digest": "a", "extras": ["dev"]}), encoding="utf-8")
    found = environment.installed_extras(stamp, "a")
    assert found >= {"dev", "cpu", "cli", "export"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert found - {"dev"} == set(extras["dev"][0].removeprefix("mirrorsd[").removesuffix("]").split(","))
    assert environment.installed_extras(stamp, "b") == set()
    stamp.write_text("half a fi", encoding="utf-8")
    assert environment.installed_extras(stamp, "a") == set()


def test_digest_follows_pyproject_and_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_script("environment", monkeypatch)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    first = environment.needs_digest(tmp_path)
    assert environment.needs_digest(tmp_path) == first
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert environment.needs_digest(tmp_path / "copy") != first, "a copy's environment has the first clone's package"
    (tmp_path / "constraints.txt").write_text("2", encoding="utf-8")
    assert environment.needs_digest(tmp_path) != first


def test_the_oldest_packages_are_resolved_from_the_lower_bounds_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, asked = load_script("environment", monkeypatch), []
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("", encoding="utf-8")

    def call(command: list[str], advice: str, variables: dict[str, str] | None = None) -> None:
        (tmp_path / ".venv-oldest").mkdir(exist_ok=True)
        asked.append((command, advice))

    monkeypatch.setattr(environment, "_call", call)
    monkeypatch.setattr(environment, "uv_variables", lambda _: {})
    python = environment.ensure_end("oldest", {"dev"})
    assert python.is_relative_to(tmp_path / ".venv-oldest")
    (_, _), (_, _), (resolving, advice), (installing, _) = asked
    assert {"compile", "--extra", "dev", "--resolution", "lowest-direct"} <= set(resolving)
    assert "lower bounds" in advice
    assert resolving[-1] == installing[-1], "what was resolved is installed"
    assert environment.ensure_end("oldest", {"dev"}) == python
    assert len(asked) == 4, "they are there"


def test_uv_is_told_what_pip_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = load_script("environment", monkeypatch)
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nextra-index-url = file:///one\n    file:///two\nindex-url = https://mine/simple\ntimeout = 3\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", "/here /there")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uvs/simple")
    told = environment.uv_variables(Path(sys.executable))
    assert told["UV_INDEX"] == "file:///one file:///two"
    assert told["UV_FIND_LINKS"] == "/here,/there"
    assert told["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert "UV_DEFAULT_INDEX" not in told, "uv's own variable stays"


@pytest.mark.parametrize("failing", [None, "uv==", "-c"])
def test_pip_installs_where_uv_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str | None
) -> None:
    """uv may be nowhere to be had, or not understand an index."""
    environment, asked = load_script("environment", monkeypatch), []

    def run(command: list[str], *_: object) -> int:
        asked.append(command)
        return int(failing is not None and len(asked) < 3 and any(word.startswith(failing) for word in command))

    monkeypatch.setattr(environment, "run_here", run)
    monkeypatch.setattr(environment, "uv_variables", lambda _: {})
    environment._install(["dev"])
    assert asked[-1][-1] == ".[dev]"
    assert Path(asked[-1][0]).stem == ("python" if failing else "uv")
    assert ("pip does" in capsys.readouterr().out) == (failing is not None)


@pytest.mark.parametrize(("end", "folders"), [("oldest", {"unit"}), ("newest", {"unit", "parity", "end_to_end"})])
def test_packages_of_either_end_run_their_tests(monkeypatch: pytest.MonkeyPatch, end: str, folders: set[str]) -> None:
    script, asked = load_script("test", monkeypatch), []
    monkeypatch.setattr(script, "run_here", lambda command, variables, *_: asked.append((command, variables)) or 0)
    monkeypatch.setattr(script, "ensure_end", lambda end, extras: Path(f"{end}-python"))
    monkeypatch.setattr(script, "ensure_environment", lambda _: pytest.fail("it has one of its own"))
    monkeypatch.setattr(sys, "argv", ["test.py", "--only", end, "-k", "manifest"])
    assert script.main() == 0
    ((command, variables),) = asked
    assert command[0] == f"{end}-python"
    assert {*(f"tests/{folder}" for folder in folders), "not long", "manifest"} <= {*command}
    assert Path(variables["PYTHONPATH"]).name == ".typing"


@pytest.mark.parametrize("times", [0, 1, 2])
def test_tests_run_once_more_where_a_process_died(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    """Once: what dies twice has failed."""
    script, runs = load_script("test", monkeypatch), []

    def run(_: list[str], variables: dict[str, str], *__: object) -> int:
        runs.append(variables)
        if len(runs) <= times:
            Path(variables[script.DIED]).write_text("test_this.py::test_that", encoding="utf-8")
        return int(len(runs) <= times)

    monkeypatch.setattr(script, "run_here", run)
    assert script.run_part("python", "end-to-end", [], {}) == (times < 2)
    assert len(runs) == min(times, 1) + 1
    assert ("a process died in test_this.py::test_that" in capsys.readouterr().out) == bool(times)


def test_what_takes_too_long_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = load_script("environment", monkeypatch)
    status = environment.run_here([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2)
    assert status == environment.OVERDUE
    assert "had not ended after 0 s" in capsys.readouterr().err


def test_what_is_compiled_is_kept_whatever_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_script("environment", monkeypatch)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert environment.run_here([sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)"]) == 0


def test_unknown_options_go_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("test", monkeypatch)
    options, rest = script.parse_arguments(["--quick", "-k", "manifest", "--only", "tests", "-x"])
    assert options.quick
    assert options.only == "tests"
    assert rest == ["-k", "manifest", "-x"]


@pytest.mark.skipif(os.name == "nt", reason="makes a junction there, through cmd")
def test_typing_link_points_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("test", monkeypatch)
    script.link_package(tmp_path)
    script.link_package(tmp_path)
    assert (tmp_path / ".typing" / "mirrorsd").resolve() == tmp_path.resolve()


def test_the_gpu_check_exports_only_what_cuda_computes_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, commands = load_script("check_gpu", monkeypatch), []
    monkeypatch.setattr(script, "why_not", lambda: "")
    monkeypatch.setattr(script, "ensure_environment", lambda _: None)
    monkeypatch.setattr(script.environment, "use_folder", lambda _: None)
    monkeypatch.setattr(script, "WORKPLACE", tmp_path)
    monkeypatch.setattr(script, "run_here", lambda command: commands.append(command) or 0)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    assert script.main() == 0
    exports = [command for command in commands if "export" in command]
    assert [command[command.index("--precision") + 1] for command in exports] == ["fp16", "int8", "int4", "fp16"]
    for command in exports:
        computes = command[command.index("--compute" if "--compute" in command else "--precision") + 1]
        dtype = {"fp16": "float16", "bf16": "bfloat16"}[computes]
        check_computes(load_device_map("cuda-cpu"), dtype)


def test_without_a_gpu_the_check_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("check_gpu", monkeypatch)
    monkeypatch.setattr(script.shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    assert script.main() == 4
    assert "nvidia-smi was not found: there is no NVIDIA driver" in capsys.readouterr().err
    monkeypatch.setattr(script.shutil, "which", lambda _: "/bin/false")
    assert "finds no GPU (it says nothing)" in script.why_not()


def test_stand_ins_for_devices_fail_skip_and_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("test", monkeypatch)
    asked: list[list[str]] = []
    told: list[dict[str, str]] = []

    def run(command: list[str], variables: dict[str, str], *_: object) -> int:
        asked.append(command)
        told.append(variables)
        return int("tests/device" in command and "DEVICE" in variables and variables["DEVICE"] == "broken")

    def stand_in(words: str, status: int) -> list[str]:
        return ["sh", "-c", f"echo setting up; echo '{words}'; exit {status}"]

    monkeypatch.setattr(script.sys, "platform", "linux")
    monkeypatch.setattr(script, "run_here", run)
    monkeypatch.setattr(script, "ensure_environment", lambda _: Path("python"))
    monkeypatch.setattr(sys, "argv", ["test.py", "--only", "tests"])
    assert script.main() == 0
    assert [words[-1] for words in asked] == ["not long"], "without --devices nothing is installed"
    assert "== tests 0 s" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["test.py", "--only", "tests", "--devices"])
    there = {"gpu": stand_in('{"DEVICE": "fine"}', 0), "npu": stand_in("no wine here", 1), "none": stand_in("x", 0)}
    monkeypatch.setattr(script, "DEVICES", there)
    assert script.main() == 0
    printed = capsys.readouterr().out
    assert "== gpu: ready" in printed and "== none: ready" in printed
    assert "== npu: skipped" in printed and "no wine here" in printed
    assert [words[-1] for words in asked[1:]] == ["not long or npu_compiler"]
    assert [variables.get("DEVICE") for variables in told[1:]] == ["fine"]
    monkeypatch.setattr(script, "DEVICES", {"gpu": stand_in('{"DEVICE": "broken"}', 0)})
    assert script.main() == 1
    assert "FAILED: tests" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_types_are_checked_beside_the_tests_and_told_once(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("test", monkeypatch)

    def run(
        command: list[str], variables: dict[str, str], output: IO[str] | None = None, limit_s: float | None = None
    ) -> int:
        if "mypy" not in command:
            return 0
        assert output is not None, "nothing is told in the middle of the tests"
        output.write(f"{len(command)} words are right\n")
        return status

    monkeypatch.setattr(script, "run_here", run)
    monkeypatch.setattr(script, "ensure_environment", lambda _: Path("python"))
    monkeypatch.setattr(sys, "argv", ["test.py"])
    assert script.main() == status
    printed = capsys.readouterr().out
    assert printed.count("words are right") == 2
    assert printed.count("FAILED: types") == 2 * status, "where it is told, and at the end"
    assert "types 0 s" in printed


def test_a_device_that_is_not_set_up_in_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("test", monkeypatch)
    monkeypatch.setattr(script, "SETUP_LIMIT_S", 0.01)
    assert script.prepare(["sleep", "5"])[:2] == (None, "it was not set up within 0.01 s")
    monkeypatch.setattr(script.sys, "platform", "win32")
    assert script.prepare(["sleep", "5"]).variables is None


def test_all_tiers_run_together_unless_one_or_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("test", monkeypatch)
    assert script.parts_of(None, ["-m", "not long", "-k", "manifest"]) == ("lint", "types", "tests")
    assert {"tests/unit", "tests/parity", "tests/end_to_end"} <= {*script.folders_of("tests", ["-k", "manifest"])}
    assert script.folders_of("tests", ["tests/unit/house/test_scripts.py::test_a"]) == ()
    assert script.folders_of("unit", []) == ("tests/unit",)
    assert script.parts_of("unit", []) == ("unit",)
    assert script.parts_of("ray", []) == ("ray",)
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.rglob("test_*.py"))}
    assert {Path(folder).name for tier in (script.TIERS | script.RAY).values() for folder in tier} == folders
    for status, is_fine in ((0, True), (5, True), (1, False)):
        monkeypatch.setattr(script, "run_here", lambda *_, status=status: status)
        assert script.run_part("python", "unit", [], {}) is is_fine
    monkeypatch.setattr(script, "run_here", lambda *_: 5)
    assert not script.run_part("python", "tests", ["tests/unit/house/test_pages.py", "-k", "nothing"], {})


def test_the_webgpu_check_says_what_a_software_gpu_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("check_webgpu", monkeypatch)
    monkeypatch.setattr(script.sys, "platform", "linux")
    monkeypatch.setattr(script, "GPUS", ())
    monkeypatch.setattr(script, "SOFTWARE", (tmp_path / "missing.so",))
    monkeypatch.setattr(script, "ensure_environment", lambda _: pytest.fail("nothing is made for nothing"))
    monkeypatch.setattr(sys, "argv", ["check_webgpu.py"])
    assert script.main() == 4
    assert "apt-get install chromium libvulkan1 gcc" in capsys.readouterr().err


def test_a_gpu_s_own_driver_comes_before_the_software_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("check_webgpu", monkeypatch)
    monkeypatch.setattr(script.sys, "platform", "linux")
    monkeypatch.setattr(script, "GPUS", ("null",))
    assert script.gpu_variables(may_install=False) == {}
