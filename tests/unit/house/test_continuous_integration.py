"""The files of the continuous integration: they can be read, name three systems, and call the one script."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "scripts/test.py"


def test_the_workflow_runs_the_script_on_three_systems() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}, "YAML reads `on` as true"
    gate, oldest, newest, whole = (workflow["jobs"][name] for name in ("gate", "oldest", "newest", "test"))
    systems = [re.sub("-latest$", "", system) for system in whole["strategy"]["matrix"]["system"]]
    assert systems == ["ubuntu", "windows", "macos"]
    assert whole["runs-on"] == "${{ matrix.system }}"
    assert [step["run"] for step in whole["steps"] if "run" in step] == [f"python {SCRIPT}"]
    parts = [step["run"] for step in gate["steps"] if "run" in step]
    assert parts == [f"python {SCRIPT} --only {part}" for part in ("lint", "types", "unit")]
    for name, job in (("oldest", oldest), ("newest", newest)):
        assert [step["run"] for step in job["steps"] if "run" in step] == [f"python {SCRIPT} --only {name}"]
    assert workflow[True]["schedule"], "packages get newer while nothing is pushed"
    steps = [*gate["steps"], *oldest["steps"], *newest["steps"], *whole["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_every_workflow_is_yaml_with_jobs() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.y*ml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_the_other_file_calls_the_same_script() -> None:
    assert f"python3 {SCRIPT}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert (ROOT / SCRIPT).is_file()


def test_the_workflow_s_python_is_the_oldest_that_is_supported() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = set(re.findall(r'python-version: "(.*)"', text)) - {"3.13"}  # with the newest packages
    assert f'requires-python = ">={version}"' in pyproject
